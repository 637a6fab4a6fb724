"""A prompt that was quarantined says what is known of the crashes it ran through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from contract.errors import PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import Ledger
from contract.queues import queue
from contract.settings import WorkerSettings
from worker.intake import Intake

VITALS = {"step": 7, "rows": 3, "peak_memory_mb": 100}
PLAIN = "a worker crashed while this prompt ran"


@pytest.fixture
def process(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Callable[..., Intake]:
    """A worker's process that has begun; no thread of it does anything."""

    def begun(name: str, predecessor: str | None = None, step: int = 7) -> Intake:
        vitals = VITALS | {"step": step}
        one = Intake(redis, ledger, worker_settings(name=name, scan_s=60), lambda: vitals, predecessor)
        one.evidence.begin(predecessor)
        one._beat()
        return one

    return begun


def die(redis: Redis, one: Intake) -> None:
    """It is gone; its leases run out."""
    key = queue(redis, "demo", "normal").started_job_registry.key
    for member in redis.zrange(key, 0, -1):
        redis.zadd(key, {member: 1})
    one.reconciler.run()


def fall_over(redis: Redis, one: Intake) -> None:
    """It leaves with an error, its rows given back."""
    error = RuntimeError("the loop fell over\nand more")
    one.__exit__(RuntimeError, error, None)


def quarantined(one: Intake) -> str:
    assert one.take(1) == []
    (rejected,) = one.rejected()
    assert rejected.error.code == ErrorCode.WORKER_CRASHED
    assert one.fail(rejected)
    return str(rejected.error)


def test_each_crash_is_told_with_worker_end_step_and_memory(
    redis: Redis, submit: Callable[..., str], process: Any
) -> None:
    submit(1)
    ends = [("a", die), ("b", fall_over), ("a", die)]
    for step, (name, end) in enumerate(ends):
        one = process(name, step=step)
        assert len(one.take(1)) == 1
        end(redis, one)
    assert quarantined(process("a", predecessor="signal 9 (SIGKILL)")) == (
        f"{PLAIN}, 3 times: "
        "a (gone without a word; when last seen step 0, 3 rows, peak memory 100 MB), "
        "b (RuntimeError: the loop fell over; when last seen step 1, 3 rows, peak memory 100 MB), "
        "a (signal 9 (SIGKILL); when last seen step 2, 3 rows, peak memory 100 MB)"
    )
    assert not redis.exists("dllm:crashes:b")


def test_what_a_process_said_itself_is_not_overwritten(redis: Redis, submit: Callable[..., str], process: Any) -> None:
    submit(1)
    for _ in range(3):
        one = process("a", predecessor="exit code 1")
        one.take(1)
        fall_over(redis, one)
    message = quarantined(process("a", predecessor="exit code 1"))
    assert message.count("RuntimeError: the loop fell over") == 3


def test_who_only_kept_a_suspect_waiting_is_not_named(redis: Redis, submit: Callable[..., str], process: Any) -> None:
    """The second row waits, leased, while the first runs alone; the worker that dies then is no evidence against it."""
    submit(2)
    for name in ("a", "b"):
        one = process(name)
        assert len(one.take(2)) == 2
        die(redis, one)
    keeper = process("keeper")
    (alone,) = keeper.take(2)
    die(redis, keeper)
    other = process("c")
    assert [row.index for row in other.take(2)] == [1 - alone.index]
    die(redis, other)
    message = other.evidence.of("b", 1 - alone.index)
    assert [part.split()[0] for part in message.split("), ")] == ["a", "b"]
    last = process("d")
    last.take(2)
    told = {row.index: str(row.error) for row in last.rejected()}
    assert told.keys() == {0, 1}
    assert "keeper" in told[alone.index]
    assert "keeper" not in told[1 - alone.index]


@pytest.mark.parametrize("end", ["finish", "retry", "fail"])
def test_a_row_that_comes_to_an_end_leaves_no_evidence(
    redis: Redis, submit: Callable[..., str], process: Any, end: str
) -> None:
    submit(1)
    one = process("a")
    one.take(1)
    die(redis, one)
    other = process("b")
    (row,) = other.take(1)
    assert redis.exists("dllm:crashes:b")
    failure = PromptFailure(ErrorCode.MODEL_ERROR, "it failed")
    {
        "finish": lambda: other.finish([row]),
        "retry": lambda: other.retry(row, failure),
        "fail": lambda: other.fail(row, failure),
    }[end]()
    assert not redis.exists("dllm:crashes:b")


def test_a_process_that_leaves_in_order_leaves_no_evidence(redis: Redis, process: Any) -> None:
    process("a").__exit__(None, None, None)
    assert not redis.exists("dllm:lives:a")


def test_evidence_does_not_last_for_ever_nor_grow(redis: Redis, process: Any) -> None:
    for _ in range(40):
        process("a")
    assert redis.hlen("dllm:lives:a") <= 17
    assert 0 < redis.ttl("dllm:lives:a") <= 86_400


def test_without_evidence_the_prompt_is_quarantined_all_the_same(
    redis: Redis, submit: Callable[..., str], process: Any
) -> None:
    submit(1)
    for _ in range(3):
        one = process("a")
        one.take(1)
        die(redis, one)
    redis.delete("dllm:lives:a")
    message = quarantined(process("z"))
    assert message == f"{PLAIN}, 3 times: " + ", ".join(["a (gone without a word)"] * 3)
