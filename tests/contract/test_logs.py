"""Every event, ours or a library's, is one JSON line in the file; prompts are not."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from contract import logs


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, settings = list(root.handlers), root.level, structlog.get_config()
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    structlog.configure(**settings)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "worker.jsonl").read_text(encoding="utf-8").splitlines()]


def test_events_are_json_lines_with_bound_values_and_a_time(tmp_path: Path) -> None:
    logs.set_up(tmp_path / "logs", "worker", "info", 1)
    logs.get(batch="b", worker="w").info("row done", index=3, text="ünï\nline")
    (event,) = events(tmp_path / "logs")
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "row done",
        "level": "info",
        "batch": "b",
        "worker": "w",
        "index": 3,
        "text": "ünï\nline",
    }


def test_exceptions_are_in_the_file_on_one_line(tmp_path: Path) -> None:
    logs.set_up(tmp_path, "worker", "info", 1)
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logs.get().exception("unexpected")
    (event,) = events(tmp_path)
    assert "Traceback" in event["exception"]
    assert event["exception"].endswith("ValueError: what went wrong")


def test_local_variables_of_an_exception_are_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def denoise(prompt: str) -> None:
        raise ValueError("what went wrong")

    logs.set_up(tmp_path, "worker", "info", 1)
    try:
        denoise("a secret".upper())
    except ValueError:
        logs.get().exception("unexpected")
    shown = capsys.readouterr().err
    assert "what went wrong" in shown
    assert "A SECRET" not in shown + (tmp_path / "worker.jsonl").read_text()


def test_libraries_log_into_the_same_file(tmp_path: Path) -> None:
    logs.set_up(tmp_path, "worker", "info", 1)
    logging.getLogger("some.library").warning("careful: %s", "hot", extra={"degrees": 90})
    logging.getLogger("rq.worker").info("chatter")
    (event,) = events(tmp_path)
    assert (event["event"], event["level"], event["degrees"]) == ("careful: hot", "warning", 90)


@pytest.mark.parametrize(("level", "seen"), [("debug", 3), ("info", 2), ("error", 1)])
def test_the_level_decides_what_is_written(tmp_path: Path, level: str, seen: int) -> None:
    logs.set_up(tmp_path, "worker", level, 1)
    logs.get().debug("one")
    logs.get().info("two")
    logs.get().error("three")
    assert len(events(tmp_path)) == seen


def test_quiet_keeps_the_terminal_to_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(tmp_path, "worker", "info", 1, quiet=True)
    logs.get().info("unseen")
    logs.get().warning("seen")
    printed = capsys.readouterr()
    assert "unseen" not in printed.err
    assert "seen" in printed.err
    assert printed.out == ""
    assert len(events(tmp_path)) == 2


def test_setting_up_twice_writes_each_event_once(tmp_path: Path) -> None:
    logs.set_up(tmp_path, "worker", "info", 1)
    logs.set_up(tmp_path, "worker", "info", 1)
    logs.get().info("once")
    assert len(events(tmp_path)) == 1


def test_a_full_file_is_rotated(tmp_path: Path) -> None:
    logs.set_up(tmp_path, "worker", "info", 1)
    for _ in range(3):
        logs.get().info("x" * 600_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker.jsonl", "worker.jsonl.1", "worker.jsonl.2"]
