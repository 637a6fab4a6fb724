"""The durable truth about batches, in Redis: totals, done and failed marks, state, cursor.

RQ's own records of a job are short-lived and can be cleaned up by any tool; these are ours. A batch is a hash, two
bitmaps (a bit per row) and a few small keys. Setting a bit twice changes nothing, so counts add up however often a
step is repeated after a crash. The first mark wins: a row that has ended stays ended the way it did.

    dllm:batches                     sorted set of batch ids by creation time
    dllm:open                        set of the batch ids that are not published yet
    dllm:batch:{id}                  hash: spec (JSON), state, total, finished_at, hours (JSON) where it has any
    dllm:batch:{id}:cursor           JSON Cursor: how far the source has been submitted
    dllm:batch:{id}:done, :failed    bitmaps by row index
    dllm:batch:{id}:starts           hash index -> starts that never ended, that is, crashes survived
    dllm:batch:{id}:lock:{purpose}   lease of the one process that submits or publishes the batch
    dllm:outputs                     hash output name -> the batch that owns it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict
from redis import Redis, WatchError
from redis.client import Pipeline
from redis.lock import Lock

from contract.hours import Hours
from contract.jobs import Priority
from contract.sampling import SamplingParams

PREFIX = "dllm"
LOCK_S = 30.0
"""A lock not extended for this long belongs to a dead process."""


class BatchState(StrEnum):
    """A batch's life: submitting -> running -> done; a retry of failed rows leads from done to running."""

    SUBMITTING = "submitting"
    RUNNING = "running"
    DONE = "done"


class Mark(StrEnum):
    """How a row ended."""

    DONE = "done"
    FAILED = "failed"


class BatchSpec(BaseModel):
    """What was asked for; written once, at creation.

    `source` is the file's name as the user knows it; `output` the stem of the published files, owned by this batch
    alone; `params` what rows get that do not say otherwise; `hours` when it may run, None for always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: str
    source: str
    output: str
    kind: Literal["txt", "jsonl"]
    txt_mode: Literal["lines", "file"] = "lines"
    model: str
    priority: Priority
    params: SamplingParams
    created_at: float
    hours: Hours | None = None


class Cursor(BaseModel):
    """How far a source has been submitted: the next byte, line and row index. All three move together."""

    model_config = ConfigDict(frozen=True)

    offset: int = 0
    line: int = 1
    index: int = 0


class Counts(BaseModel):
    """How a batch stands. `total` is None until its source has been read to the end."""

    model_config = ConfigDict(frozen=True)

    total: int | None
    submitted: int
    done: int
    failed: int

    @property
    def ended(self) -> int:
        return self.done + self.failed

    @property
    def complete(self) -> bool:
        return self.total is not None and self.ended >= self.total


class Batch(BaseModel):
    """A batch as the ledger knows it at one moment."""

    model_config = ConfigDict(frozen=True)

    spec: BatchSpec
    state: BatchState
    counts: Counts
    finished_at: float | None = None


class Ledger:
    """All reads and writes of the keys above. Holds a connection (bytes, not text) and nothing else."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._create = redis.register_script(_CREATE)
        self._mark = redis.register_script(_MARK)

    @staticmethod
    def key(batch: str, part: str | None = None) -> str:
        """Redis key of a batch, or of one part of it."""
        return f"{PREFIX}:batch:{batch}:{part}" if part else f"{PREFIX}:batch:{batch}"

    def lock(self, batch: str, purpose: Literal["submit", "seal"]) -> Lock:
        """A lease of `LOCK_S` seconds on one kind of work on a batch; extend it with `reacquire()`."""
        return cast(Lock, self.redis.lock(self.key(batch, f"lock:{purpose}"), timeout=LOCK_S, blocking=False))

    # Batches

    def create(self, spec: BatchSpec) -> bool:
        """Record a new batch; False when its id is known already (then nothing changes)."""
        keys = [self.key(spec.batch), f"{PREFIX}:batches", f"{PREFIX}:open"]
        hours = spec.hours.model_dump_json() if spec.hours else ""
        return bool(self._create(keys=keys, args=[spec.batch, spec.model_dump_json(), spec.created_at, hours]))

    def reserve_output(self, batch: str, name: str) -> bool:
        """Make `name` this batch's output name; False when another batch owns it."""
        if self.redis.hsetnx(f"{PREFIX}:outputs", name, batch):
            return True
        return _text(self.redis.hget(f"{PREFIX}:outputs", name)) == batch

    def release_output(self, batch: str, name: str) -> None:
        """Give up an output name that `reserve_output` gave this batch; another batch's name is left alone."""
        if _text(self.redis.hget(f"{PREFIX}:outputs", name)) == batch:
            self.redis.hdel(f"{PREFIX}:outputs", name)

    def get(self, batch: str) -> Batch | None:
        """The batch, or None when it is not known."""
        return next(iter(self.get_many([batch])), None)

    def get_many(self, batches: Sequence[str]) -> list[Batch]:
        """The known ones of `batches`, in that order, in one round trip."""
        with self.redis.pipeline(transaction=True) as pipe:
            for batch in batches:
                pipe.hgetall(self.key(batch))
                pipe.get(self.key(batch, "cursor"))
                pipe.bitcount(self.key(batch, "done"))
                pipe.bitcount(self.key(batch, "failed"))
            answers = iter(pipe.execute())
        records = zip(answers, answers, answers, answers, strict=True)
        return [_batch(*record) for record in records if record[0]]

    def newest(self, count: int = 100) -> list[Batch]:
        """The newest batches, newest first."""
        batches = cast("list[bytes]", self.redis.zrevrange(f"{PREFIX}:batches", 0, count - 1))
        return self.get_many([_text(batch) for batch in batches])

    def open_batches(self) -> list[str]:
        """Ids of the batches that are not published yet."""
        return sorted(_text(batch) for batch in cast("set[bytes]", self.redis.smembers(f"{PREFIX}:open")))

    def close(self, batch: str) -> None:
        """The batch is published and its source moved: nothing more will happen to it unprompted."""
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.key(batch), mapping={"state": BatchState.DONE, "finished_at": time.time()})
            pipe.srem(f"{PREFIX}:open", batch)
            pipe.delete(self.key(batch, "starts"))
            pipe.execute()

    # Submitting

    def cursor(self, batch: str) -> Cursor:
        """Where submitting goes on."""
        return _cursor(self.redis.get(self.key(batch, "cursor")))

    def advance(
        self,
        batch: str,
        old: Cursor,
        new: Cursor,
        failed: Iterable[int],
        enqueue: Callable[[Pipeline], None],
        last: bool,
    ) -> bool:
        """Move the cursor from `old` to `new`, mark unreadable rows and enqueue the rest, all or nothing.

        `last` says that the source ends at `new`. False when another process moved the cursor first; then nothing
        was enqueued and the caller should let go of the batch.
        """
        key = self.key(batch, "cursor")
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.watch(key)  # type: ignore[no-untyped-call]
            if _cursor(pipe.get(key)) != old:
                return False
            pipe.multi()
            pipe.set(key, new.model_dump_json())
            for index in failed:
                pipe.setbit(self.key(batch, Mark.FAILED), index, 1)
            enqueue(pipe)
            if last:
                pipe.hset(self.key(batch), mapping={"total": new.index, "state": BatchState.RUNNING})
            try:
                pipe.execute()
            except WatchError:
                return False
        return True

    # Rows

    def mark(self, pipe: Pipeline, batch: str, index: int, mark: Mark, lease: tuple[str, str] | None = None) -> None:
        """Queue on `pipe`: mark a row as ended, once.

        `lease` is a sorted set and the member that must be in it; a worker that lost its lease marks nothing.
        The pipeline's answer is 1 when this call ended the row, 0 when it had ended before, -1 when the lease is lost.
        """
        keys = [self.key(batch, Mark.DONE), self.key(batch, Mark.FAILED), self.key(batch, "starts")]
        fence = list(lease) if lease else ["", ""]
        self._mark(keys=[*keys, fence[0] or keys[0]], args=[index, mark, fence[1]], client=pipe)

    def marks(self, rows: Sequence[tuple[str, int]]) -> list[Mark | None]:
        """How each (batch, index) ended, or None for those that have not; one round trip."""
        with self.redis.pipeline(transaction=False) as pipe:
            for batch, index in rows:
                pipe.getbit(self.key(batch, Mark.DONE), index)
                pipe.getbit(self.key(batch, Mark.FAILED), index)
            bits = iter(pipe.execute())
        return [Mark.DONE if done else Mark.FAILED if failed else None for done, failed in zip(bits, bits, strict=True)]

    def end_start(self, pipe: Pipeline, batch: str, index: int) -> None:
        """Queue on `pipe`: the row came to an orderly end or was given back; it is no suspect any more."""
        pipe.hdel(self.key(batch, "starts"), str(index))

    def bitmap(self, batch: str, mark: Mark) -> bytes:
        """The batch's done or failed bits, most significant bit first in each byte, as Redis keeps them."""
        return cast("bytes | None", self.redis.get(self.key(batch, mark))) or b""

    def reopen(self, batch: str, indices: Iterable[int], enqueue: Callable[[Pipeline], None]) -> None:
        """Take back the failed marks of `indices` and enqueue those rows again, all or nothing."""
        submitted = self.redis.hexists(self.key(batch), "total")  # while its source is being read, that goes on
        with self.redis.pipeline(transaction=True) as pipe:
            for index in indices:
                pipe.setbit(self.key(batch, Mark.FAILED), index, 0)
                self.end_start(pipe, batch, index)
            if submitted:
                pipe.hset(self.key(batch), "state", BatchState.RUNNING)
            pipe.hdel(self.key(batch), "finished_at")
            pipe.sadd(f"{PREFIX}:open", batch)
            enqueue(pipe)
            pipe.execute()

    def lose(self, batch: str, indices: Iterable[int]) -> None:
        """Turn done marks into failed ones: the outputs of `indices` were lost from the disk before publishing."""
        with self.redis.pipeline(transaction=True) as pipe:
            for index in indices:
                pipe.setbit(self.key(batch, Mark.DONE), index, 0)
                pipe.setbit(self.key(batch, Mark.FAILED), index, 1)
            pipe.execute()


_CREATE = """
if redis.call('HSETNX', KEYS[1], 'spec', ARGV[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', 'submitting')
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'hours', ARGV[4]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
return 1
"""

# KEYS done, failed, starts, lease set; ARGV index, mark, lease member ('' for none).
_MARK = """
if ARGV[3] ~= '' and not redis.call('ZSCORE', KEYS[4], ARGV[3]) then return -1 end
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('GETBIT', KEYS[1], ARGV[1]) + redis.call('GETBIT', KEYS[2], ARGV[1]) > 0 then return 0 end
redis.call('SETBIT', ARGV[2] == 'done' and KEYS[1] or KEYS[2], ARGV[1], 1)
return 1
"""


def _batch(fields: dict[bytes, bytes], cursor: bytes | None, done: int, failed: int) -> Batch:
    total = fields.get(b"total")
    finished = fields.get(b"finished_at")
    return Batch(
        spec=BatchSpec.model_validate_json(fields[b"spec"]),
        state=BatchState(_text(fields[b"state"])),
        counts=Counts(
            total=None if total is None else int(total),
            submitted=_cursor(cursor).index,
            done=done,
            failed=failed,
        ),
        finished_at=None if finished is None else float(finished),
    )


def _cursor(value: Any) -> Cursor:
    return Cursor.model_validate_json(value) if value else Cursor()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
