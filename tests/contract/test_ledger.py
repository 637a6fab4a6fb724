"""The ledger's counts add up however often a step is repeated, and whoever repeats it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline
from redis.exceptions import ResponseError

from contract.ledger import BatchSpec, BatchState, Counts, Cursor, Ledger, Mark
from contract.sampling import SamplingParams
from tests.conftest import batch_spec

END = Cursor(offset=9, line=4, index=3)


@pytest.fixture
def spec() -> Callable[..., BatchSpec]:
    def made(batch: str = "b", **values: Any) -> BatchSpec:
        usual = {"source": "f.txt", "output": "f", "kind": "txt", "model": "demo", "priority": "low", "created_at": 1.0}
        return BatchSpec(**{"batch": batch, "params": SamplingParams(seed=7), **usual, **values})  # type: ignore[arg-type]

    return made


@pytest.fixture
def batch(ledger: Ledger, spec: Callable[..., BatchSpec]) -> str:
    assert ledger.create(spec())
    return "b"


def pushing(*values: str) -> Callable[[Pipeline], None]:
    """Stands for enqueuing jobs."""
    return lambda pipe: pipe.rpush("queue", *values) and None


def queued(redis: Redis) -> list[bytes]:
    return redis.lrange("queue", 0, -1)


def mark(ledger: Ledger, index: int, how: Mark, lease: tuple[str, str] | None = None) -> int:
    with ledger.redis.pipeline() as pipe:
        ledger.mark(pipe, "b", index, how, lease)
        return int(pipe.execute()[-1])


# Batches


def test_a_batch_comes_back_as_it_was_created(ledger: Ledger, spec: Callable[..., BatchSpec]) -> None:
    assert ledger.create(spec())
    batch = ledger.get("b")
    assert batch is not None
    assert batch.spec == spec()
    assert (batch.state, batch.finished_at) == (BatchState.SUBMITTING, None)
    assert batch.counts == Counts(total=None, submitted=0, done=0, failed=0)
    assert not batch.counts.complete
    assert ledger.open_batches() == ["b"]


def test_creating_again_changes_nothing(ledger: Ledger, spec: Callable[..., BatchSpec]) -> None:
    assert ledger.create(spec())
    ledger.advance("b", Cursor(), END, [], pushing("x"), last=True)
    before = ledger.get("b")
    assert not ledger.create(spec(model="other", created_at=99.0))
    assert ledger.get("b") == before
    assert len(ledger.newest()) == 1


def test_the_newest_batches_come_first_and_unknown_ones_are_left_out(
    ledger: Ledger, spec: Callable[..., BatchSpec]
) -> None:
    for number in (2, 3, 1):
        ledger.create(spec(f"b{number}", created_at=float(number)))
    assert [batch.spec.batch for batch in ledger.newest(2)] == ["b3", "b2"]
    assert [batch.spec.batch for batch in ledger.get_many(["b1", "nobody", "b2"])] == ["b1", "b2"]
    assert ledger.get("nobody") is None


def test_an_output_name_belongs_to_the_first_who_reserves_it(ledger: Ledger) -> None:
    assert ledger.reserve_output("a", "name")
    assert ledger.reserve_output("a", "name")
    assert not ledger.reserve_output("b", "name")
    ledger.release_output("b", "name")
    assert not ledger.reserve_output("b", "name")
    ledger.release_output("a", "name")
    assert ledger.reserve_output("b", "name")


def test_only_one_process_has_a_lock_and_each_purpose_has_its_own(ledger: Ledger, batch: str) -> None:
    first, second = ledger.lock(batch, "submit"), ledger.lock(batch, "submit")
    assert first.acquire()
    assert not second.acquire()
    assert ledger.lock(batch, "seal").acquire()
    first.release()
    assert second.acquire()


# Submitting


def test_advancing_moves_the_cursor_marks_unreadable_rows_and_enqueues_the_rest(
    ledger: Ledger, redis: Redis, batch: str
) -> None:
    assert ledger.advance(batch, Cursor(), END, [1], pushing("b-0", "b-2"), last=False)
    assert ledger.cursor(batch) == END
    assert queued(redis) == [b"b-0", b"b-2"]
    found = ledger.get(batch)
    assert found is not None
    assert found.counts == Counts(total=None, submitted=3, done=0, failed=1)
    assert found.state is BatchState.SUBMITTING


def test_the_last_advance_tells_the_total(ledger: Ledger, batch: str) -> None:
    assert ledger.advance(batch, Cursor(), END, [0, 1, 2], lambda pipe: None, last=True)
    found = ledger.get(batch)
    assert found is not None
    assert found.counts == Counts(total=3, submitted=3, done=0, failed=3)
    assert found.counts.complete
    assert found.state is BatchState.RUNNING


def test_a_stale_cursor_is_refused_and_nothing_is_enqueued(ledger: Ledger, redis: Redis, batch: str) -> None:
    assert ledger.advance(batch, Cursor(), END, [], pushing("first"), last=False)
    assert not ledger.advance(batch, Cursor(), END, [0], pushing("again"), last=True)
    assert queued(redis) == [b"first"]
    assert ledger.get(batch).counts == Counts(total=None, submitted=3, done=0, failed=0)  # type: ignore[union-attr]


def test_a_cursor_moved_at_the_last_moment_is_noticed(ledger: Ledger, redis: Redis, batch: str) -> None:
    def overtaken(pipe: Pipeline) -> None:
        assert ledger.advance(batch, Cursor(), END, [], pushing("theirs"), last=False)
        pipe.rpush("queue", "ours")

    assert not ledger.advance(batch, Cursor(), END, [0], overtaken, last=True)
    assert queued(redis) == [b"theirs"]
    assert ledger.get(batch).counts.failed == 0  # type: ignore[union-attr]


def test_an_error_while_enqueuing_leaves_everything_as_it_was(ledger: Ledger, redis: Redis, batch: str) -> None:
    def dying(pipe: Pipeline) -> None:
        pipe.rpush("queue", "half")
        raise RuntimeError("no further")

    with pytest.raises(RuntimeError):
        ledger.advance(batch, Cursor(), END, [0], dying, last=True)
    assert queued(redis) == []
    assert ledger.cursor(batch) == Cursor()
    assert ledger.get(batch).counts == Counts(total=None, submitted=0, done=0, failed=0)  # type: ignore[union-attr]


# Rows


@pytest.mark.parametrize(("first", "second"), [(Mark.DONE, Mark.FAILED), (Mark.FAILED, Mark.DONE)])
def test_the_first_mark_wins_and_counts_once(ledger: Ledger, batch: str, first: Mark, second: Mark) -> None:
    assert [mark(ledger, 5, how) for how in (first, first, second)] == [1, 0, 0]
    assert ledger.marks([("b", 5), ("b", 6), ("nobody", 0)]) == [first, None, None]
    assert ledger.get(batch).counts.ended == 1  # type: ignore[union-attr]


def test_a_mark_without_the_lease_it_names_is_refused(ledger: Ledger, redis: Redis, batch: str) -> None:
    redis.zadd("leases", {"mine": 1})
    redis.hset(ledger.key(batch, "starts"), "0", 1)
    assert mark(ledger, 0, Mark.DONE, ("leases", "theirs")) == -1
    assert ledger.marks([("b", 0)]) == [None]
    assert redis.hlen(ledger.key(batch, "starts")) == 1
    assert mark(ledger, 0, Mark.DONE, ("leases", "mine")) == 1
    assert redis.hlen(ledger.key(batch, "starts")) == 0


def test_counts_add_up_over_a_million_rows_in_little_memory(ledger: Ledger, redis: Redis, batch: str) -> None:
    total = 1_000_000
    ledger.advance(batch, Cursor(), Cursor(index=total), range(0, total, 50_000), lambda pipe: None, last=True)
    assert mark(ledger, total - 1, Mark.DONE) == 1
    counts = ledger.get(batch).counts  # type: ignore[union-attr]
    assert counts == Counts(total=total, submitted=total, done=1, failed=20)
    assert (counts.ended, counts.complete) == (21, False)
    assert redis.strlen(ledger.key(batch, Mark.DONE)) == total // 8
    bits = ledger.bitmap(batch, Mark.FAILED)
    assert sum(byte.bit_count() for byte in bits) == 20
    assert ledger.bitmap("nobody", Mark.DONE) == b""


def test_lost_outputs_become_failures(ledger: Ledger, batch: str) -> None:
    for index in range(3):
        mark(ledger, index, Mark.DONE)
    ledger.lose(batch, [1])
    ledger.lose(batch, [1])
    assert ledger.marks([("b", index) for index in range(3)]) == [Mark.DONE, Mark.FAILED, Mark.DONE]


# Closing and opening again


def test_a_closed_batch_is_done_and_not_open(ledger: Ledger, redis: Redis, batch: str) -> None:
    redis.hset(ledger.key(batch, "starts"), "0", 1)
    before = time.time()
    ledger.close(batch)
    found = ledger.get(batch)
    assert found is not None
    assert found.state is BatchState.DONE
    assert found.finished_at is not None
    assert before <= found.finished_at <= time.time()
    assert ledger.open_batches() == []
    assert not redis.exists(ledger.key(batch, "starts"))


def test_reopening_takes_back_failures_and_enqueues_at_once(ledger: Ledger, redis: Redis, batch: str) -> None:
    ledger.advance(batch, Cursor(), END, [0, 2], lambda pipe: None, last=True)
    mark(ledger, 1, Mark.DONE)
    ledger.close(batch)
    ledger.reopen(batch, [2], pushing("b-2"))
    found = ledger.get(batch)
    assert found is not None
    assert (found.state, found.finished_at) == (BatchState.RUNNING, None)
    assert found.counts == Counts(total=3, submitted=3, done=1, failed=1)
    assert ledger.open_batches() == ["b"]
    assert queued(redis) == [b"b-2"]


def test_reopening_a_batch_still_being_read_lets_that_go_on(ledger: Ledger, batch: str) -> None:
    ledger.advance(batch, Cursor(), END, [0], lambda pipe: None, last=False)
    ledger.reopen(batch, [0], pushing("b-0"))
    found = ledger.get(batch)
    assert found is not None
    assert found.state is BatchState.SUBMITTING
    assert found.counts == Counts(total=None, submitted=3, done=0, failed=0)


def test_an_error_while_reopening_leaves_the_batch_closed(ledger: Ledger, redis: Redis, batch: str) -> None:
    ledger.advance(batch, Cursor(), END, [0], lambda pipe: None, last=True)
    ledger.close(batch)

    def dying(pipe: Pipeline) -> None:
        raise ResponseError("no further")

    with pytest.raises(ResponseError):
        ledger.reopen(batch, [0], dying)
    assert ledger.get(batch).state is BatchState.DONE  # type: ignore[union-attr]
    assert ledger.marks([("b", 0)]) == [Mark.FAILED]


def test_a_glance_says_of_each_open_batch_how_it_stands_and_whether_it_is_complete(
    ledger: Ledger, submit: Callable[..., str], redis: Redis
) -> None:
    for batch in ("running", "complete", "published"):
        submit(2, batch=batch)
    ledger.create(batch_spec(batch="read"))
    with redis.pipeline() as pipe:
        for batch, mark in (("running", Mark.DONE), ("complete", Mark.DONE), ("published", Mark.DONE)):
            ledger.mark(pipe, batch, 0, mark)
        for batch, mark in (("complete", Mark.CANCELLED), ("published", Mark.FAILED)):
            ledger.mark(pipe, batch, 1, mark)
        pipe.execute()
    ledger.close("published")
    redis.sadd("dllm:open", "nobody")
    assert sorted(ledger.glance()) == [
        ("complete", BatchState.RUNNING, True),
        ("read", BatchState.SUBMITTING, False),
        ("running", BatchState.RUNNING, False),
    ]
