"""`producer logs`: the story of a prompt across processes, at the default log level, and how it stands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from contract import logs, sealing
from contract.errors import PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import Ledger
from contract.paths import Folders
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from producer.cli import app
from tests.conftest import completion_row, failure_row
from worker.intake import Intake


@pytest.fixture
def logging_of_a_worker(worker_settings: Callable[..., WorkerSettings]) -> Iterator[Callable[[str], None]]:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield lambda name: logs.set_up(worker_settings(), f"worker-{name}", quiet=True, worker=name)
    for handler in {*root.handlers, *logging.getLogger(logs.AUDIT).handlers} - set(before[0]):
        handler.close()
    root.handlers, logging.getLogger(logs.AUDIT).handlers = before[0], []
    root.setLevel(before[1])
    logging.captureWarnings(False)


@pytest.fixture
def told(folders: Folders, redis_url: str) -> Callable[..., Any]:
    def run(*words: str, code: int = 0) -> Any:
        flags = ["--root", str(folders.root), "--redis-url", redis_url]
        result = CliRunner().invoke(app, ["logs", *words, *flags])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in words else result.output

    return run


@pytest.fixture
def story(
    logging_of_a_worker: Callable[[str], None],
    submit: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
) -> str:
    """A batch of which row 0 ran well, row 1 crashed with worker w1 and then failed, and row 2 waits for a retry."""
    submit(4, "b")
    settings = worker_settings(name="w1", retry_base_s=1000.0, retry_max_s=1000.0)
    logging_of_a_worker("w1")
    one = Intake(redis, ledger, settings)
    (first, second) = one.take(2)
    with SegmentWriter(folders, "b", "w1") as segment:
        segment.append([completion_row(0, worker="w1", output="what was answered")])
    one.finish([first], {"b-0": 2})
    one.journal.tell(now=True)
    redis.zadd(second.lease.lane.started, {second.lease.member: 1})  # w1 is gone and its lease ran out
    logging_of_a_worker("w2")
    two = Intake(redis, ledger, settings.model_copy(update={"name": "w2"}))
    two.reconciler.run()
    again, third = two.take(2)
    with SegmentWriter(folders, "b", "w2") as segment:
        segment.append([failure_row(1, "no numbers", worker="w2")])
    two.fail(again, PromptFailure(ErrorCode.MODEL_ERROR, "no numbers"))
    assert two.retry(third, PromptFailure(ErrorCode.MODEL_ERROR, "once"))
    two.journal.tell(now=True)
    return "b"


def names(document: Any) -> list[tuple[str, str]]:
    return [(event["worker"], event["event"]) for event in document["events"] if "worker" in event]


def test_the_story_of_each_prompt_is_told_across_workers(story: str, told: Callable[..., Any]) -> None:
    first, second, third, fourth = (told(f"b:{index}", "--json") for index in range(4))
    assert names(first) == [("w1", "rows_taken"), ("w1", "rows_finished")]
    assert names(second) == [
        ("w1", "rows_taken"),
        ("w2", "rows_put_back"),
        ("w2", "prompt_outlived_worker"),
        ("w2", "rows_taken"),
    ]
    assert second["events"][2]["of"] == "w1"
    assert names(third) == [("w2", "rows_taken"), ("w2", "prompt_retried")]
    assert names(fourth) == []
    standing = first["standing"]
    assert (standing["state"], standing["worker"], standing["id"]) == ("done", "w1", "id-0")
    assert "what was answered" not in json.dumps(first)
    assert (second["standing"]["state"], second["standing"]["code"]) == ("failed", "model_error")
    assert third["standing"]["state"] == "waits for its next attempt"
    assert fourth["standing"]["state"] == "waits"


def test_a_dead_letter_is_told_from_the_published_files_when_the_logs_are_gone(
    story: str, told: Callable[..., Any], ledger: Ledger, folders: Folders, redis: Redis
) -> None:
    for index in (2, 3):
        with redis.pipeline() as pipe, SegmentWriter(folders, "b", "w3") as segment:
            segment.append([completion_row(index, worker="w3")])
            ledger.mark(pipe, "b", index, "done")  # type: ignore[arg-type]
            pipe.execute()
    assert sealing.seal("b", ledger, folders)
    for file in folders.logs.glob("*.jsonl"):
        file.unlink()
    shown = told("b:1")
    assert "the logs hold nothing of it" in shown
    assert "stands: state failed" in shown
    assert "message no numbers" in shown
    assert "worker w3" in told("b:3")


def test_a_batch_is_told_for_people(story: str, told: Callable[..., Any]) -> None:
    lines = told("b").splitlines()
    assert any("w1  rows taken  rows 0-1" in line for line in lines)
    assert lines[-1].startswith("stands: state running, total 4")
    assert told("b", "--since", "0s").splitlines()[-1] == lines[-1]


def test_what_is_not_there_is_said(story: str, told: Callable[..., Any]) -> None:
    assert "4 rows: the last one's index is 3" in told("b:4", code=2)
    assert "after the colon stands a row's index" in told("b:x", code=2)
    assert "neither Redis nor the logs know" in told("nobody", code=2)
