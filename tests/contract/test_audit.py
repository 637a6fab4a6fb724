"""The audit log: who asked for what, and what came of it; nothing of what was said."""

from __future__ import annotations

import getpass
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract import audit, cancelling, events, logs, sealing
from contract.ledger import Ledger
from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings
from producer.claims import Claims
from producer.submitter import submit
from tests.conftest import batch_spec


@pytest.fixture
def told(folders: Folders, producer_settings: Callable[..., ProducerSettings]) -> Iterator[Any]:
    """The lines of the audit log so far, of a process that logs nothing else."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    logs.set_up(producer_settings(log_level="error"), "test", quiet=True)
    root.handlers = before[0]
    yield lambda: [json.loads(line) for line in (folders.logs / "audit.jsonl").read_text().splitlines()]
    logging.getLogger(logs.AUDIT).handlers[0].close()
    logging.getLogger(logs.AUDIT).handlers = []
    logging.captureWarnings(False)
    root.setLevel(before[1])


def test_a_batch_is_told_from_its_submission_to_its_end_without_a_prompt(
    told: Any, ledger: Ledger, folders: Folders, producer_settings: Callable[..., ProducerSettings]
) -> None:
    settings = producer_settings(params=SamplingParams(temperature=0.5), priority="high")
    file = folders.root / "own.jsonl"
    file.write_text('{"prompt": "what nobody is to know"}\nno JSON\n')
    spec = Claims(settings, ledger, "key-of-research").snapshot(file)
    assert submit(spec, ledger, settings)
    ended = cancelling.cancel(spec.batch, ledger, folders)
    audit.cancelled(spec.batch, ended.rows)
    sealing.seal_ready(ledger, folders)
    submitted, published, cancelled = told()
    where = {"timestamp", "level", "host", "pid", "event", "batch"}
    for line, name in ((submitted, "submitted"), (cancelled, "cancelled"), (published, "published")):
        assert (line["event"], line["batch"]) == (name, spec.batch)
        assert set(line) == {*where, *events.AUDIT_EVENTS[name].fields}
    assert (submitted["via"], submitted["user"]) == ("key-of-research", getpass.getuser())
    assert (submitted["file"], submitted["bytes"]) == ("own.jsonl", file.stat().st_size)
    assert (submitted["model"], submitted["priority"], submitted["params"]["temperature"]) == ("demo", "high", 0.5)
    assert (published["rows"], published["failed"], published["cancelled"], cancelled["rows"]) == (2, 1, 1, 1)
    assert "nobody is to know" not in (folders.logs / "audit.jsonl").read_text()


def test_secrets_are_masked_and_a_full_disk_stops_nobody(
    told: Any, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit.submitted(batch_spec(model="redis://user:hunter22@host"), 1, "command")
    assert "hunter22" not in json.dumps(told())
    monkeypatch.setattr("contract.logfiles.os.write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    audit.requeued("b", 3)
    assert len(told()) == 1
