"""Every event, ours or a library's, is one JSON line in the file; prompts and secrets are not."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from contract import logs
from contract.settings import Settings

SECRETS = {
    "redis://user:pa/ss@word@host:6379/0": "pa/ss@word",
    "sentinel://h:1/m?sentinel_password=hunter22": "hunter22",
    '{"api_key": "abcdef123456"}': "abcdef123456",
    "Authorization: Bearer abc.def-ghi": "abc.def",
    "used sk-abcdefghijklmnop today": "abcdefghijklmnop",
    "TOKEN=tttttttt": "tttttttt",
    "the key from the environment is gateway-key-1 or gateway-key-2": "gateway-key",
    "and the address's own pass%word or pass/word": "word or",
}


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, settings = list(root.handlers), root.level, structlog.get_config()
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)
    structlog.configure(**settings)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., None]:
    """Set logging up on a folder of the test's."""

    def set_up(quiet: bool = False, worker: str | None = None, **values: Any) -> None:
        logs.set_up(Settings(root=tmp_path, **values), "worker", quiet, worker)

    return set_up


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in text().splitlines()]

    def text() -> str:
        return (tmp_path / "logs" / "worker.jsonl").read_text(encoding="utf-8")

    return read


def test_events_are_json_lines_with_bound_values_and_a_time(begin: Any, events: Any, tmp_path: Path) -> None:
    begin(worker="w")
    logs.get(batch="b").info("row done", index=3, text="ünï\nline")
    (event,) = events()
    assert list(event)[:6] == ["timestamp", "level", "event", "host", "pid", "worker"]
    assert event.pop("timestamp").endswith("Z")
    assert event.pop("host") == logs.host()
    assert event.pop("pid") == os.getpid()
    assert event == {
        "event": "row done",
        "level": "info",
        "batch": "b",
        "worker": "w",
        "index": 3,
        "text": "ünï\nline",
    }


def test_exceptions_are_in_the_file_on_one_line(begin: Any, events: Any) -> None:
    begin()
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logs.get().exception("unexpected")
    (event,) = events()
    assert "Traceback" in event["exception"]
    assert event["exception"].endswith("ValueError: what went wrong")


def test_local_variables_of_an_exception_are_shown_nowhere(
    begin: Any, events: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def denoise(prompt: str) -> None:
        raise ValueError("what went wrong")

    begin()
    try:
        denoise("a secret".upper())
    except ValueError:
        logs.get().exception("unexpected")
    shown = capsys.readouterr().err
    assert "what went wrong" in shown
    assert "A SECRET" not in shown + str(events())


def test_what_libraries_and_python_say_are_events_in_the_same_file(
    begin: Any, events: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    library = logging.getLogger("transformers")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    begin()
    logging.getLogger("transformers.models").warning("careful: %s", "hot", extra={"degrees": 90})
    logging.getLogger("rq.worker").info("chatter")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    hot, old = events()
    assert (hot["event"], hot["level"], hot["degrees"]) == ("library_message", "warning", 90)
    assert (hot["logger"], hot["message"]) == ("transformers.models", "careful: hot")
    assert (old["event"], old["level"]) == ("python_warning", "warning")
    assert "DeprecationWarning: old" in old["message"]
    assert capsys.readouterr().err.count("careful: hot") == 1


@pytest.mark.parametrize("text", SECRETS)
def test_no_secret_gets_out(
    begin: Any, events: Any, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLLM_API_KEYS", "gateway-key-1, gateway-key-2")
    begin(redis_url="redis://:pass%25word@host/0")
    logs.get(secret=text).warning(text.replace("pass%word", "pass%25word"))
    logging.getLogger("some.library").warning(text)
    try:
        raise ValueError(text)
    except ValueError:
        logs.get().exception("unexpected")
    assert SECRETS[text] not in str(events()) + capsys.readouterr().err


def test_what_is_no_secret_stays(begin: Any, events: Any) -> None:
    begin()
    logs.get().info("batch_throughput", output_tokens=12, tokens_per_forward=2.5, mask_token="<|mask|>", to="a@b")
    (event,) = events()
    assert (event["output_tokens"], event["tokens_per_forward"], event["to"]) == (12, 2.5, "a@b")


@pytest.mark.parametrize(("level", "seen"), [("debug", 3), ("info", 2), ("error", 1)])
def test_the_level_decides_what_is_written(begin: Any, events: Any, level: str, seen: int) -> None:
    begin(log_level=level)
    logs.get().debug("one")
    logs.get().info("two")
    logs.get().error("three")
    assert len(events()) == seen


def test_quiet_keeps_the_terminal_to_warnings(begin: Any, events: Any, capsys: pytest.CaptureFixture[str]) -> None:
    begin(quiet=True)
    logs.get().info("unseen")
    logs.get().warning("seen")
    printed = capsys.readouterr()
    assert "unseen" not in printed.err
    assert "seen" in printed.err
    assert printed.out == ""
    assert len(events()) == 2


def test_what_goes_its_usual_way_is_in_the_file_alone(
    begin: Any, events: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    begin()
    logs.get().info("rows_taken", indices={"b": "0-3"}, rows=4)
    logs.get().info("batch_published", batch="b")
    shown = capsys.readouterr().err
    assert "batch_published" in shown
    assert "rows_taken" not in shown
    assert len(events()) == 2


def test_setting_up_twice_writes_each_event_once(begin: Any, events: Any) -> None:
    begin()
    begin()
    logs.get().info("once")
    assert len(events()) == 1


def test_lines_that_a_full_disk_did_not_take_are_counted(
    begin: Any, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    begin()
    with monkeypatch.context() as disk:
        disk.setattr("contract.logfiles.os.write", full)
        logs.get().info("one")
        logs.get().info("two")
    logs.get().info("three")
    assert [(event["event"], event.get("lines")) for event in events()] == [("three", None), ("log_lines_lost", 2)]
