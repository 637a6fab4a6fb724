"""One prompt is one RQ job in JSON, queued with everything else or not at all; RQ 3.0 keeps to what we stand on."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from rq import Queue, Retry
from rq.job import Job
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from contract import queues
from contract.errors import PromptFailure
from contract.jobs import PRIORITIES, ErrorCode, PromptJob
from contract.ledger import Ledger
from contract.names import Names
from contract.queues import enqueuing, failed_jobs, queue, requeuing
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests.conftest import waiting_ids
from worker.intake import Intake


@pytest.fixture
def target(redis: Redis) -> Queue:
    return queue(redis, "demo", "normal")


@pytest.fixture
def intake(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Intake:
    return Intake(redis, ledger, worker_settings(name="w"))


@pytest.fixture
def failed(submit: Callable[..., str], intake: Intake) -> str:
    """A batch of three whose rows all failed."""
    batch = submit(3)
    for row in intake.take(3):
        assert intake.fail(row, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
    return batch


def job(index: int, **values: Any) -> PromptJob:
    return PromptJob(
        **{"batch": "b", "index": index, "line": index + 1, "id": "x", "prompt": "hi", "submitted_at": 1.0, **values}
    )


def run(redis: Redis, *actions: Callable[..., None]) -> None:
    with redis.pipeline() as pipe:
        for action in actions:
            action(pipe)
        pipe.execute()


# Names


def test_a_models_queues_come_in_order_of_urgency(redis: Redis) -> None:
    assert [one.name for one in queues.queues(redis, "demo")] == ["dllm-demo-high", "dllm-demo-normal", "dllm-demo-low"]
    assert PRIORITIES == ("high", "normal", "low")


@pytest.mark.parametrize("model", ["LLaDA-8B-v1.5", "org/name", "a b:c*", "ünï"])
def test_any_model_name_gives_a_plain_queue_name(model: str) -> None:
    name = Names().queue(model, "low")
    assert name.isascii()
    assert not set(name) & set(" /:*")
    assert name.startswith("dllm-")
    assert name.endswith("-low")


# Enqueuing


def test_a_job_is_json_and_never_pickle(redis: Redis, target: Queue) -> None:
    run(redis, enqueuing(target, [job(0, params=SamplingParams(seed=7), prompt="ünï")]))
    record = redis.hgetall(Job.key_for("b-0"))
    function, instance, args, values = json.loads(zlib.decompress(record[b"data"]))
    assert (function, instance, values) == ("worker.tasks.denoise", None, {})
    assert PromptJob.model_validate(args[0]) == job(0, params=SamplingParams(seed=7), prompt="ünï")
    assert not any(value.startswith(b"\x80") for value in record.values())


def test_what_is_queued_is_what_rq_itself_would_queue(redis: Redis, target: Queue) -> None:
    wanted = job(0, prompt="ünï", params=SamplingParams(temperature=0.5))
    run(redis, enqueuing(target, [wanted]))
    target.enqueue_many(
        [
            Queue.prepare_data(
                queues.TASK,
                args=(wanted.model_dump(mode="json", exclude_defaults=True),),
                job_id="by-rq",
                description="b row 0",
                result_ttl=0,
                failure_ttl=queues.FAILURE_TTL_S,
                timeout=-1,
                retry=Retry(max=queues.RETRIES),
            )
        ]
    )
    ours, theirs = (redis.hgetall(Job.key_for(job_id)) for job_id in ("b-0", "by-rq"))
    for record in (ours, theirs):
        assert JSONSerializer.loads(zlib.decompress(record.pop(b"data")))[2] == [
            wanted.model_dump(mode="json", exclude_defaults=True)
        ]
        assert record.pop(b"created_at") <= record.pop(b"enqueued_at")
    assert {name: value for name, value in theirs.items() if value} == {
        name: value for name, value in ours.items() if value
    }
    assert waiting_ids(redis) == ["by-rq", "b-0"]
    assert Queue.all(connection=redis, serializer=JSONSerializer) == [target]


def test_jobs_stand_in_the_order_of_their_rows_and_have_their_names(redis: Redis, target: Queue) -> None:
    run(redis, enqueuing(target, [job(index) for index in range(20)]))
    assert waiting_ids(redis) == [f"b-{index}" for index in range(20)]
    assert queues.depths(redis, "demo") == {"high": 0, "normal": 20, "low": 0}
    found = Job.fetch("b-3", redis, serializer=JSONSerializer)
    assert (found.get_status(), found.description, found.timeout) == ("queued", "b row 3", -1)


def test_enqueuing_writes_everything_through_the_pipeline(redis: Redis, target: Queue) -> None:
    with redis.pipeline() as pipe:
        enqueuing(target, [job(0), job(1)])(pipe)
        assert not list(redis.scan_iter("rq:job:*"))
        assert waiting_ids(redis) == []
        pipe.execute()
    assert waiting_ids(redis) == ["b-0", "b-1"]


def test_enqueuing_nothing_does_nothing(redis: Redis, target: Queue) -> None:
    run(redis, enqueuing(target, []))
    assert waiting_ids(redis) == []


# Failed jobs


def test_only_rows_whose_job_is_kept_can_be_queued_again(redis: Redis, target: Queue, failed: str) -> None:
    redis.delete(Job.key_for("b-1"))
    assert failed_jobs(redis, target, failed, [0, 1, 2, 3]) == [0, 2]


def test_requeuing_forgets_attempts_and_errors_and_the_jobs_expiry(
    redis: Redis, target: Queue, submit: Callable[..., str], intake: Intake
) -> None:
    submit(2)
    error = PromptFailure(ErrorCode.MODEL_ERROR, "it failed")
    assert all(intake.retry(row, error) for row in intake.take(2))
    rows = intake.take(1, wait_s=20) + intake.take(1, wait_s=20)
    assert [row.attempt for row in rows] == [2, 2]
    assert all(intake.fail(row, error) for row in rows)
    run(redis, requeuing(redis, target, ["b-1", "b-0"]))
    assert waiting_ids(redis) == ["b-1", "b-0"]
    assert FailedJobRegistry(queue=target).get_job_ids() == []
    record = redis.hgetall(Job.key_for("b-0"))
    assert record[b"status"] == b"queued"
    assert not {b"meta", b"exc_info"} & record.keys()
    assert redis.ttl(Job.key_for("b-0")) == -1


def test_requeuing_writes_everything_through_the_pipeline(redis: Redis, target: Queue, failed: str) -> None:
    with redis.pipeline() as pipe:
        requeuing(redis, target, ["b-0", "b-nowhere"])(pipe)
        assert waiting_ids(redis) == []
        assert FailedJobRegistry(queue=target).count == 3
        pipe.execute()
    assert waiting_ids(redis) == ["b-0"]
    assert FailedJobRegistry(queue=target).count == 2


def test_requeued_jobs_can_be_taken_once_their_marks_are_taken_back(
    redis: Redis, ledger: Ledger, target: Queue, failed: str, intake: Intake
) -> None:
    ledger.reopen(failed, [0, 2], requeuing(redis, target, ["b-0", "b-2"]))
    rows = intake.take(5)
    assert [(row.index, row.attempt, row.suspect) for row in rows] == [(0, 1, 0), (2, 1, 0)]
    assert intake.finish(rows) == 2


# RQ


def test_rqs_clean_up_of_an_abandoned_job_is_one_transaction(
    redis: Redis, target: Queue, submit: Callable[..., str], intake: Intake
) -> None:
    submit(1)
    intake.take(1)
    registry = StartedJobRegistry(queue=target)
    redis.zadd(registry.key, dict.fromkeys(redis.zrange(registry.key, 0, -1), 1))
    sent: list[tuple[Any, ...]] = []
    with redis.monitor() as monitor:
        registry.cleanup()
        redis.set("end", "1")
        commands: Iterator[str] = (event["command"] for event in monitor.listen())
        for command in commands:
            if command.startswith("SET end"):
                break
            sent.append(tuple(command.split()[:2]))
    names = [name for name, *_ in sent]
    begin, end = names.index("MULTI"), names.index("EXEC")
    moves = [place for place, name in enumerate(names) if name in ("RPUSH", "LPUSH", "ZREMRANGEBYSCORE")]
    assert len(moves) == 2
    assert all(begin < place < end for place in moves)
    assert waiting_ids(redis) == ["b-0"]


def test_living_workers_are_listed_with_what_they_serve(
    redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> None:
    assert queues.workers(redis) == []
    with Intake(redis, ledger, worker_settings(name="w2")), Intake(redis, ledger, worker_settings(name="w1")):
        found = queues.workers(redis)
        assert [worker.name for worker in found] == ["w1", "w2"]
        assert found[0].serves("demo")
        assert not found[0].serves("other")
        assert found[0].last_heartbeat is not None
    assert queues.workers(redis) == []
