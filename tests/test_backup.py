"""A server restored from an hour ago: rows run again, and nothing that was published is doubled or made worse."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from contract import cancelling, queues, sealing, server
from contract.auditing import Auditor
from contract.errors import DllmError
from contract.ledger import BatchState, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims, Look
from producer.submitter import submit
from tests.conftest import completion_row
from tests.servers import free_port, running
from worker.intake import Intake
from worker.outputs import Outputs

APPENDING = ("--appendonly", "yes")


class Installation:
    """A root, and a server of its own that is backed up and restored."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folders = Folders(folder / "root").create()
        self.redis = queues.connect(url)
        self.ledger = Ledger(self.redis)
        common: dict[str, Any] = {"root": self.folders.root, "redis_url": url, "keep_segments_s": 3600.0}
        self.producer = ProducerSettings(**common)
        self.worker = WorkerSettings(**common, name="w", linger_ms=0, lease_s=1.0, scan_s=0.1)

    def submit(self, name: str) -> str:
        file = self.folders.inputs / f"{name}.txt"
        file.write_text("".join(f"prompt {number}\n" for number in range(6)))
        spec = Claims(self.producer, self.ledger).take(file, Look.at(file))
        assert spec is not None
        assert submit(spec, self.ledger, self.producer)
        return spec.batch

    def run(self, most: int, answer: str) -> list[str]:
        """Answer up to `most` rows; returns their jobs' ids."""
        with (
            Intake(self.redis, self.ledger, self.worker) as intake,
            Outputs(self.folders, self.ledger, "w") as outputs,
        ):
            rows = intake.take(most)
            told = {"id": str, "prompt": lambda index: f"prompt {index}"}
            outputs.write(
                [
                    (row.batch, completion_row(row.index, answer, **{name: of(row.index) for name, of in told.items()}))
                    for row in rows
                ]
            )
            intake.finish(rows)
            outputs.sealed_if_complete({row.batch for row in rows})
            return sorted(row.job.job_id for row in rows)

    def answers(self, name: str) -> list[str]:
        lines = (self.folders.outputs / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["output"] for line in lines]

    def state(self, batch: str) -> BatchState | None:
        record = self.ledger.get(batch)
        return record.state if record else None


def backed_up(redis: Redis, data: Path, target: Path) -> None:
    """As docs/operations.md says."""
    assert redis.save()
    target.mkdir()
    shutil.copy(data / "dump.rdb", target / "dump.rdb")


def test_a_restored_server_runs_rows_again_and_publishes_what_was_published(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    with running(tmp_path / "data", port, *APPENDING):
        here = Installation(tmp_path, url)
        early = here.submit("early")
        assert here.run(2, "before") == [f"{early}-0", f"{early}-1"]
        backed_up(here.redis, tmp_path / "data", tmp_path / "restored")
        late = here.submit("late")
        here.run(12, "after")
        begun = here.submit("begun")
        assert len(here.run(2, "after")) == 2
        assert (here.state(early), here.state(late)) == (BatchState.DONE, BatchState.DONE)
        files = {file.name: file.read_bytes() for file in here.folders.outputs.glob("*.jsonl")}
        here.redis.close()
    with running(tmp_path / "restored", port, "--appendonly", "no"):
        here = Installation(tmp_path, url)
        here.redis.config_set("appendonly", "yes")
        server.check(here.redis)
        assert (here.state(early), here.state(late)) == (BatchState.RUNNING, None)
        assert here.run(12, "again") == [f"{early}-{index}" for index in range(2, 6)]
        assert here.state(early) is BatchState.DONE
        assert {file.name: file.read_bytes() for file in here.folders.outputs.glob("*.jsonl")} == files
        assert here.answers("early") == ["before"] * 2 + ["after"] * 4
        (claim,) = Claims(here.producer, here.ledger).pending()  # which the ledger learns of by this
        assert claim.batch == begun
        assert submit(claim, here.ledger, here.producer)
        assert len(here.run(12, "again")) == 6
        assert here.answers("begun") == ["after"] * 2 + ["again"] * 4
        assert [found.kind for found in Auditor(here.ledger, here.folders).look()] == []
        assert here.submit("late") != late
        here.run(12, "new")
        assert here.answers("late-2") == ["new"] * 6  # the old name is taken, though no ledger says so
        assert here.answers("late") == ["after"] * 6


def test_a_published_file_is_not_replaced_by_one_with_fewer_rows(
    submit: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    """Without `keep_segments_s` the rows from before the backup are in the published file alone."""
    batch = submit(2)
    with Outputs(folders, ledger, "w") as outputs:
        outputs.write([(batch, completion_row(index)) for index in range(2)])
    ledger.redis.set(ledger.key(batch, "done"), b"\xc0")
    assert sealing.seal(batch, ledger, folders)
    before = (folders.outputs / f"{batch}.jsonl").read_bytes()
    shutil.rmtree(folders.segments / batch)
    ledger.redis.hset(ledger.key(batch), "state", "running")  # as the backup has it
    ledger.redis.sadd("dllm:open", batch)
    with pytest.raises(DllmError, match="was published already with 2 rows, of which 0 are known now"):
        sealing.seal(batch, ledger, folders)
    assert sealing.seal_ready(ledger, folders) == []
    assert (folders.outputs / f"{batch}.jsonl").read_bytes() == before
    assert ledger.get(batch).counts.done == 2  # type: ignore[union-attr]


def test_what_was_published_stays_when_an_older_state_of_its_batch_is_cancelled(
    submit: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    batch = submit(2)
    (folders.outputs / f"{batch}.jsonl").write_text('{"id": "0"}\n{"id": "1"}\n')
    with pytest.raises(DllmError, match="it stays as it is"):
        cancelling.cancel(batch, ledger, folders)
    assert (folders.outputs / f"{batch}.jsonl").read_text().count("\n") == 2
    (folders.outputs / f"{batch}.jsonl").unlink()
    assert sealing.seal_ready(ledger, folders) == [batch]


def test_segments_are_kept_as_long_as_a_backup_may_be_old(
    submit: Callable[..., str], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "SYNCED_S", 0.0)
    batch = submit(0)
    assert sealing.seal_ready(ledger, folders, keep_s=60.0) == [batch]
    ledger.redis.hset(ledger.key(batch), "finished_at", time.time() - 50)
    sealing.seal_ready(ledger, folders, keep_s=60.0)
    assert (folders.segments / batch).exists()
    ledger.redis.hset(ledger.key(batch), "finished_at", time.time() - 70)
    sealing.seal_ready(ledger, folders, keep_s=60.0)
    assert not (folders.segments / batch).exists()
