"""Cancelling on a real server: a row ends once, whoever is first, and counts add up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline
from rq.job import Job
from rq.registry import ScheduledJobRegistry

from contract import sealing
from contract.cancelling import cancel, cancel_rows
from contract.errors import PromptFailure, UsageError
from contract.jobs import ErrorCode
from contract.ledger import BatchState, Counts, Cursor, Ledger
from contract.paths import Folders
from contract.queues import enqueuing, queue
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import batch_spec, completion_row, prompt_job, waiting_ids
from worker.intake import Intake


@pytest.fixture
def intake(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Intake:
    """A worker that only does what it is told."""
    return Intake(redis, ledger, worker_settings(name="w"))


def published(folders: Folders, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folders.outputs / name).read_text().splitlines()]


def finish(intake: Intake, rows: list[Any], folders: Folders, batch: str = "b") -> int:
    with SegmentWriter(folders, batch, "w") as segment:
        segment.append([completion_row(row.index) for row in rows])
    return intake.finish(rows)


def test_rows_that_wait_run_and_are_scheduled_end_at_once_and_what_is_done_is_published(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(6)
    first, second, third, fourth = intake.take(4)
    submit(2, batch="other")
    finish(intake, [second], folders)
    intake.retry(third, PromptFailure(ErrorCode.MODEL_ERROR, "again"))
    ended = cancel("b", ledger, folders)
    assert (ended.rows, ended.published) == (5, True)
    batch = ledger.get("b")
    assert batch is not None
    assert batch.counts == Counts(total=6, submitted=6, done=1, failed=0, cancelled=5)
    assert batch.state is BatchState.DONE
    assert [row["id"] for row in published(folders, "b.jsonl")] == ["id-1"]
    errors = published(folders, "b.errors.jsonl")
    assert [(row["id"], row["prompt"], row["error"]["code"]) for row in errors] == [
        (f"id-{index}", f"prompt {index}", "cancelled") for index in (0, 2, 3, 4, 5)
    ]
    assert [row.index for row in sealing.errors("b", ledger, folders)] == [0, 2, 3, 4, 5]
    target = queue(redis, "demo", "normal")
    assert waiting_ids(redis) == ["other-0", "other-1"]
    assert ScheduledJobRegistry(queue=target).get_job_ids() == []
    assert not list(redis.scan_iter("rq:job:b-*"))
    assert not list(redis.scan_iter("rq:execution*"))
    assert [file.name for file in folders.processed.iterdir()] == ["b.jsonl"]
    assert finish(intake, [first, fourth], folders) == 0


def test_cancelled_rows_keep_what_their_input_carried(redis: Redis, ledger: Ledger, folders: Folders) -> None:
    spec = batch_spec()
    ledger.create(spec)
    jobs = [prompt_job(spec.batch, 0, metadata={"topic": "x"})]
    target = queue(redis, spec.model, spec.priority)
    assert ledger.advance(spec.batch, Cursor(), Cursor(index=1), [], enqueuing(target, jobs), last=True)
    cancel(spec.batch, ledger, folders)
    assert [row["metadata"] for row in published(folders, "b.errors.jsonl")] == [{"topic": "x"}]


def test_a_worker_finds_its_cancelled_rows_at_its_next_heartbeat(
    ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(3)
    rows = intake.take(2)
    cancel("b", ledger, folders)
    intake._beat()
    assert sorted(row.index for row in intake.lost()) == [row.index for row in rows]
    assert intake.held() == []


@pytest.mark.parametrize("first", ["finish", "fail", "retry", "give_back", "cancel"])
def test_the_first_mark_wins(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake, first: str
) -> None:
    submit(1)
    (row,) = intake.take(1)
    error = PromptFailure(ErrorCode.MODEL_ERROR, "it failed")
    with SegmentWriter(folders, "b", "w") as segment:
        segment.append([completion_row(0)])
    acts: dict[str, Callable[[], object]] = {
        "finish": lambda: intake.finish([row]),
        "fail": lambda: intake.fail(row, error),
        "retry": lambda: intake.retry(row, error),
        "give_back": lambda: intake.give_back([row]),
        "cancel": lambda: cancel("b", ledger, folders).rows,
    }
    assert acts[first]()
    ended = first in ("finish", "fail", "cancel")
    assert bool(cancel("b", ledger, folders).rows) is not ended
    for act in ("finish", "fail", "retry", "give_back"):
        assert not acts[act]()
    batch = ledger.get("b")
    assert batch is not None
    counts = batch.counts
    assert (counts.done, counts.failed) == (int(first == "finish"), int(first == "fail"))
    assert counts.ended == 1
    assert waiting_ids(redis) == []


def test_a_worker_that_finishes_at_the_same_time_and_a_canceller_end_every_row_once(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(300)
    begun = threading.Event()

    def work() -> None:
        while rows := intake.take(7):
            finish(intake, rows, folders)
            begun.set()

    worker = threading.Thread(target=work)
    worker.start()
    begun.wait(20)
    ended = cancel("b", ledger, folders)
    worker.join(20)
    batch = ledger.get("b")
    assert batch is not None
    assert batch.counts.cancelled == ended.rows
    assert batch.counts.done + batch.counts.cancelled == 300
    sealing.seal("b", ledger, folders)
    outputs, errors = published(folders, "b.jsonl"), published(folders, "b.errors.jsonl")
    assert len(outputs) == batch.counts.done
    assert sorted([int(row["id"][3:]) for row in [*outputs, *errors]]) == list(range(300))


def test_a_row_in_the_queue_again_after_it_was_cancelled_is_not_run(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(1)
    cancel("b", ledger, folders)
    with redis.pipeline() as pipe:
        enqueuing(queue(redis, "demo", "normal"), [prompt_job("b", 0)])(pipe)
        pipe.execute()
    assert intake.take(4) == []
    assert intake.rejected() == []
    assert not redis.exists(Job.key_for("b-0"))
    assert intake.is_empty()


def test_the_submitting_of_a_cancelled_batch_stops_where_it_is(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str]
) -> None:
    batch = submit(2)
    redis.hdel(ledger.key(batch), "total")
    redis.hset(ledger.key(batch), "state", "submitting")
    assert cancel(batch, ledger, folders).rows == 2
    found = ledger.get(batch)
    assert found is not None
    assert (found.counts, found.unread) == (Counts(total=2, submitted=2, done=0, failed=0, cancelled=2), True)
    old = Cursor(offset=2, line=3, index=2)
    enqueue = enqueuing(queue(redis, "demo", "normal"), [prompt_job(batch, 2)])
    assert not ledger.advance(batch, old, Cursor(offset=3, line=4, index=3), [], enqueue, last=False)
    assert waiting_ids(redis) == []


def test_a_batch_in_the_middle_of_a_long_queue_is_taken_out_and_the_others_keep_their_order(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contract.cancelling.CHUNK", 400)
    for count, batch in ((700, "before"), (1500, "b"), (700, "b-1"), (10, "after")):
        submit(count, batch=batch)
    assert cancel("b", ledger, folders).rows == 1500
    wanted = [
        f"{batch}-{index}" for batch, count in (("before", 700), ("b-1", 700), ("after", 10)) for index in range(count)
    ]
    assert waiting_ids(redis) == wanted


def test_a_chunk_under_way_is_not_queued_when_the_batch_is_cancelled_meanwhile(
    redis: Redis, ledger: Ledger, folders: Folders
) -> None:
    ledger.create(batch_spec())
    end = Cursor(offset=1, line=2, index=1)

    def cancelled_meanwhile(pipe: Pipeline) -> None:
        enqueuing(queue(redis, "demo", "normal"), [prompt_job("b", 0)])(pipe)
        assert cancel("b", Ledger(redis), folders).published

    assert not ledger.advance("b", Cursor(), end, [], cancelled_meanwhile, last=True)
    assert waiting_ids(redis) == []
    batch = ledger.get("b")
    assert batch is not None
    assert (batch.state, batch.counts.total) == (BatchState.DONE, 0)


def test_cancelling_again_or_what_has_ended_or_is_unknown_changes_nothing(
    ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(1)
    finish(intake, intake.take(1), folders)
    sealing.seal("b", ledger, folders)
    before = ledger.get("b")
    for batch in ("b", "nobody"):
        assert cancel(batch, ledger, folders).rows == 0
        assert cancel_rows(batch, ["id-0"], ledger, folders).unknown == ["id-0"]
    assert ledger.get("b") == before
    assert ledger.get("nobody") is None


def test_single_rows_are_cancelled_by_id_and_the_others_go_on(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(3)
    (running,) = intake.take(1)
    ended = cancel_rows("b", ["id-0", "id-2", "id-9"], ledger, folders)
    assert (ended.rows, ended.unknown, ended.published) == (2, ["id-9"], False)
    assert finish(intake, [running], folders) == 0
    assert finish(intake, intake.take(3), folders) == 1
    assert sealing.seal("b", ledger, folders)
    assert [row["id"] for row in published(folders, "b.jsonl")] == ["id-1"]
    assert cancel_rows("b", ["id-1"], ledger, folders).unknown == ["id-1"]


def test_a_cancelling_that_died_is_finished_by_whoever_looks(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(3)

    class Crash(BaseException):
        pass

    def dies(*_: object) -> int:
        raise Crash

    with monkeypatch.context() as dying:
        dying.setattr("contract.cancelling.withdraw", dies)
        with pytest.raises(Crash):
            cancel("b", ledger, folders)
    found = ledger.get("b")
    assert found is not None
    assert found.being_cancelled
    assert cancel("b", ledger, folders).rows == 3
    assert [row["id"] for row in published(folders, "b.errors.jsonl")] == ["id-0", "id-1", "id-2"]


def test_a_batch_is_not_retried_while_it_is_being_cancelled(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    """Whoever cancels it has died: were it reopened now, nobody would cancel the rest."""
    submit(3)
    (row,) = intake.take(1)
    intake.fail(row, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
    assert ledger.stop("b")
    with pytest.raises(UsageError, match="is being cancelled"):
        sealing.retry("b", None, ledger, folders, redis)
    assert cancel("b", ledger, folders).rows == 2
    assert sealing.retry("b", None, ledger, folders, redis) == 1


def test_failed_rows_of_a_cancelled_batch_can_be_retried_and_cancelled_ones_stay(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(3)
    (row,) = intake.take(1)
    intake.fail(row, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
    cancel("b", ledger, folders)
    assert sealing.retry("b", None, ledger, folders, redis) == 1
    found = ledger.get("b")
    assert found is not None
    assert not found.being_cancelled
    assert finish(intake, intake.take(3), folders) == 1
    assert sealing.seal("b", ledger, folders)
    assert [row["id"] for row in published(folders, "b.jsonl")] == ["id-0"]
    assert [row["id"] for row in published(folders, "b.errors.jsonl")] == ["id-1", "id-2"]
