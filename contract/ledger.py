"""The durable truth about batches, in Redis: totals, how rows ended, state, cursor.

RQ's own records of a job are short-lived and can be cleaned up by any tool; these are ours. A batch is a hash, three
bitmaps (a bit per row) and a few small keys. Setting a bit twice changes nothing, so counts add up however often a
step is repeated after a crash. The first mark wins: a row that has ended stays ended the way it did. The keys, `dllm`
being the setting `key_prefix`:

    dllm:batches                     sorted set of batch ids by creation time
    dllm:open                        set of the batch ids that are not published yet
    dllm:batch:{id}                  hash: spec (JSON), state, total, finished_at, hours (JSON) where it has any;
                                     processed (path of its source in batch_processed/);
                                     started_at, ended_at (first start and last end of a row), output_tokens, cached;
                                     cancelled_at, unread when cancelled
    dllm:batch:{id}:cursor           JSON Cursor: how far the source has been submitted
    dllm:batch:{id}:done, :failed, :cancelled   bitmaps by row index; a row has a bit in one of them at most
    dllm:batch:{id}:starts           hash index -> starts that never ended, that is, crashes survived
    dllm:batch:{id}:lock:{purpose}   lease of the one process that submits or publishes the batch
    dllm:lock:audit                  lease of the worker that looks after all batches
    dllm:lock:content:{content}      lease of the one process that makes a batch of that content
    dllm:outputs                     hash output name -> the batch that owns it
    dllm:contents                    hash content -> the newest batch that was submitted with it
    dllm:served:{owner}              sorted set of the batches that were asked for over HTTP, by creation time
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator
from redis import WatchError
from redis.client import Pipeline
from redis.exceptions import LockError, ResponseError
from redis.lock import Lock

from contract import logs
from contract.columns import Columns
from contract.hours import Hours
from contract.jobs import OutputFormat, Priority
from contract.names import Connection
from contract.paths import is_plain
from contract.sampling import SamplingParams

Kind = Literal["txt", "jsonl", "csv", "parquet"]

LOCK_S = 30.0
"""A lock not extended for this long belongs to a dead process."""
BATCH_ID = r"^[A-Za-z0-9_-]{1,100}$"
"""Batches name keys, jobs and folders."""
PAGE = 100
"""Batches looked at in one round trip."""


class BatchState(StrEnum):
    """A batch's life: submitting -> running -> done; a retry of failed rows leads from done to running."""

    SUBMITTING = "submitting"
    RUNNING = "running"
    DONE = "done"


class Mark(StrEnum):
    """How a row ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Prices(BaseModel):
    """What the estimate of a batch's cost counts with, in any one currency; None for what costs nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    per_hour: float | None = None
    per_million_input: float | None = None
    per_million_output: float | None = None


class Served(BaseModel):
    """How a batch was asked for over HTTP: by the key of whom, with which of his files, and what he said of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    owner: str
    input_file: str
    endpoint: str
    metadata: dict[str, str] = {}


class BatchSpec(BaseModel):
    """What was asked for; written once, at creation.

    `source` is the file's name as the user knows it; `output` the stem of the published files, with the folder below
    `batch_outputs/` in which they will lie, owned by this batch alone; `output_format` the form they have beside JSON
    lines; `params` what rows get that do not say otherwise; `hours` when it may run, None for always. `packed` says
    that the source is a `.gz`, `params_line` that its first line tells parameters and is no prompt. `content` is one
    for all batches that would give the same outputs, None for those whose like is not looked for. `outputs_url` is
    where its rows and published files lie, None for `batch_outputs/`.

    Manifests and records are read back from folders and servers that others may write to; what stands here becomes
    paths, so names that lead anywhere else are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: Annotated[str, Field(pattern=BATCH_ID)]
    source: str
    output: str
    kind: Kind
    packed: bool = False
    txt_mode: Literal["lines", "file"] = "lines"
    params_line: bool = False
    columns: Columns = Columns()
    model: str
    priority: Priority
    params: SamplingParams
    created_at: float
    hours: Hours | None = None
    output_format: OutputFormat = "jsonl"
    prices: Prices | None = None
    content: str | None = None
    served: Served | None = None
    outputs_url: str | None = None

    @field_validator("source")
    @classmethod
    def _one_name(cls, source: str) -> str:
        if not is_plain(source):
            raise ValueError("source must be a file's name, without its folder")
        return source

    @field_validator("output")
    @classmethod
    def _below_the_outputs(cls, output: str) -> str:
        if not all(is_plain(part) and not part.startswith(".") for part in output.split("/")):
            raise ValueError("output must be a visible name below the folder of outputs")
        return output


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
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.cancelled

    @property
    def complete(self) -> bool:
        return self.total is not None and self.ended >= self.total


class Batch(BaseModel):
    """A batch as the ledger knows it at one moment.

    `started_at` is when a row of it was taken first, `ended_at` when the last one so far ended, by a worker;
    `output_tokens` is how many were generated for the rows done, `cached` how many of these rows have an answer that
    was given before; `processed` the path of its source in `batch_processed/`.
    `cancelled_at` is when the whole of it was cancelled; `unread` says that its source was not read to the end then.
    """

    model_config = ConfigDict(frozen=True)

    spec: BatchSpec
    state: BatchState
    counts: Counts
    started_at: float | None = None
    ended_at: float | None = None
    output_tokens: int = 0
    cached: int = 0
    processed: str | None = None
    finished_at: float | None = None
    cancelled_at: float | None = None
    unread: bool = False

    @property
    def being_cancelled(self) -> bool:
        """Was the batch cancelled, and not to its end?"""
        return self.cancelled_at is not None and self.state is not BatchState.DONE and not self.counts.complete


class Ledger:
    """All reads and writes of the keys above. Holds a connection (bytes, not text) and what it said of bad records."""

    def __init__(self, redis: Connection) -> None:
        self.redis = redis
        self._unreadable: set[str] = set()
        self._names = redis.names
        self._create = redis.register_script(_CREATE)
        self._mark = redis.register_script(_MARK)
        self._stop = redis.register_script(_STOP)
        self._forget = redis.register_script(_FORGET)
        self._glance = redis.register_script(_GLANCE)

    def key(self, batch: str, part: str | None = None) -> str:
        """Redis key of a batch, or of one part of it."""
        return self._names.batch(batch, part)

    def mark_keys(self, batch: str) -> list[str]:
        """Redis keys of a batch's bitmaps, in the order of `Mark`."""
        return [self.key(batch, mark) for mark in Mark]

    def lock(self, batch: str, purpose: Literal["submit", "seal"]) -> Lock:
        """A lease of `LOCK_S` seconds on one kind of work on a batch; extend it with `reacquire()`."""
        return cast(Lock, self.redis.lock(self.key(batch, f"lock:{purpose}"), timeout=LOCK_S, blocking=False))

    def now(self) -> float:
        """The server's time in seconds since the epoch."""
        seconds, micros = self.redis.time()
        return seconds + micros / 1e6

    def leadership(self, seconds: float) -> Lock:
        """A lease on looking after all batches, for one worker at a time; a dead one's runs out after `seconds`."""
        key = self._names.key("lock", "audit")
        return cast(Lock, self.redis.lock(key, timeout=seconds, blocking=False, thread_local=False))

    # Batches

    def create(self, spec: BatchSpec) -> bool:
        """Record a new batch; False when its id is known already (then nothing changes)."""
        keys = [self.key(spec.batch), *map(self._names.key, ("batches", "open", "contents"))]
        keys += [self._names.key("served", spec.served.owner)] if spec.served else []
        hours = spec.hours.model_dump_json() if spec.hours else ""
        words: list[Any] = [spec.batch, spec.model_dump_json(), spec.created_at, hours, spec.content or ""]
        return bool(self._create(keys=keys, args=words))

    @contextlib.contextmanager
    def first_with(self, content: str) -> Iterator[None]:
        """Within it nobody else looks whether there is a batch of that content, and makes one. Waits for its turn."""
        lock = self.redis.lock(self._names.key("lock", "content", content), timeout=LOCK_S, sleep=0.05)
        lock.acquire()
        try:
            yield
        finally:
            with contextlib.suppress(LockError):  # it ran out: whoever came then found what was there
                lock.release()

    def with_content(self, content: str) -> Batch | None:
        """The newest batch of that content, unless its source was never read to the end."""
        found = self.redis.hget(self._names.key("contents"), content)
        batch = self.get(_text(found)) if found else None
        return None if batch is None or batch.unread else batch

    def reserve_output(self, batch: str, name: str) -> bool:
        """Make `name` this batch's output name; False when another batch owns it."""
        if self.redis.hsetnx(self._names.key("outputs"), name, batch):
            return True
        return _text(self.redis.hget(self._names.key("outputs"), name)) == batch

    def release_output(self, batch: str, name: str) -> None:
        """Give up an output name that `reserve_output` gave this batch; another batch's name is left alone."""
        if _text(self.redis.hget(self._names.key("outputs"), name)) == batch:
            self.redis.hdel(self._names.key("outputs"), name)

    def get(self, batch: str) -> Batch | None:
        """The batch, or None when it is not known."""
        return next(iter(self.get_many([batch])), None)

    def get_many(self, batches: Sequence[str]) -> list[Batch]:
        """The known ones of `batches` that can be read, in that order, in one round trip."""
        return [batch for batch in self.records(batches).values() if batch is not None]

    def records(self, batches: Sequence[str]) -> dict[str, Batch | None]:
        """The known ones of `batches`, in that order; None for a record that cannot be read.

        That is one of a newer version, or of a hand that wrote to the server: it is told of in the log and left alone,
        and keeps nobody from looking after the others.
        """
        with self.redis.pipeline(transaction=True) as pipe:
            for batch in batches:
                pipe.hgetall(self.key(batch))
                pipe.get(self.key(batch, "cursor"))
                for mark in Mark:
                    pipe.bitcount(self.key(batch, mark))
            answers = iter(pipe.execute(raise_on_error=False))
        found = zip(batches, zip(answers, answers, answers, answers, answers, strict=True), strict=True)
        return {batch: self._read(batch, record) for batch, record in found if record[0]}

    def _read(self, batch: str, record: tuple[Any, ...]) -> Batch | None:
        try:
            for answer in record:
                if isinstance(answer, Exception):
                    raise answer
            return _batch(batch, *record)
        except (ResponseError, ValueError, LookupError) as error:
            if isinstance(error, ResponseError) and not str(error).startswith("WRONGTYPE"):
                raise
            if batch not in self._unreadable:
                self._unreadable.add(batch)
                reason = " ".join(str(error).split())[:500]
                logs.get(batch=batch).error("record_unreadable", reason=reason)
            return None

    def known(self) -> int:
        """How many batches there are."""
        return self.redis.zcard(self._names.key("batches"))

    def newest(self, count: int = 100, start: int = 0) -> list[Batch]:
        """The newest batches but for `start` of them, newest first."""
        batches = cast("list[bytes]", self.redis.zrevrange(self._names.key("batches"), start, start + count - 1))
        return self.get_many([_text(batch) for batch in batches])

    def newest_first(self, owner: str | None = None) -> Iterator[Batch]:
        """All batches, or all that `owner` asked for over HTTP, newest first, a page at a time."""
        key, start = self._names.key("batches") if owner is None else self._names.key("served", owner), 0
        while found := cast("list[bytes]", self.redis.zrevrange(key, start, start + PAGE - 1)):
            yield from self.get_many([_text(batch) for batch in found])
            start += PAGE

    def open_batches(self) -> list[str]:
        """Ids of the batches that are not published yet."""
        return sorted(_text(batch) for batch in cast("set[bytes]", self.redis.smembers(self._names.key("open"))))

    def glance(self) -> list[tuple[str, BatchState, bool]]:
        """Id and state of each batch that is not published yet, and whether all of its rows have ended.

        Looked at in one script: thousands of them are no work for those who look every few seconds. Those whose records
        cannot be read are left out.
        """
        patterns = [self.key("%s"), *(self.key("%s", mark) for mark in Mark)]
        found = cast("list[list[bytes]]", self._glance(keys=[self._names.key("open")], args=patterns))
        known = {state.value.encode(): state for state in BatchState}
        return [(_text(batch), known[state], complete == b"1") for batch, state, complete in found if state in known]

    def close(self, batch: str, processed: str | None = None) -> None:
        """The batch is published and its source moved, to the path `processed` where this call's process moved it.

        Nothing more will happen to it unprompted.
        """
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(self.key(batch), mapping={"state": BatchState.DONE, "finished_at": time.time()})
            if processed:
                pipe.hset(self.key(batch), "processed", processed)
            pipe.srem(self._names.key("open"), batch)
            pipe.delete(self.key(batch, "starts"))
            pipe.execute()

    def forget(self, batch: str, output: str, content: str | None) -> bool:
        """Nothing is known of a published batch any more; False when it was opened again, and nothing was done."""
        parts = ("cursor", *Mark, "starts", "backlog", "lock:submit", "lock:seal")
        keys = [self.key(batch), *map(self._names.key, ("batches", "open", "outputs", "contents"))]
        others = [*(self.key(batch, part) for part in parts), self._names.key("crashes", batch)]
        return bool(self._forget(keys=[*keys, *others], args=[batch, output, content or ""]))

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

        `last` says that the source ends at `new`. False when another process moved the cursor first, or the batch was
        cancelled; then nothing was enqueued and the caller should let go of the batch.
        """
        key = self.key(batch, "cursor")
        with self.redis.pipeline(transaction=True) as pipe:
            pipe.watch(key, self.key(batch))  # type: ignore[no-untyped-call]
            if _cursor(pipe.get(key)) != old or pipe.hexists(self.key(batch), "total"):
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

    def stop(self, batch: str) -> bool:
        """Nothing more of the source will be submitted: the batch is cancelled. False when it has ended already.

        What was submitted is all there is from now on; those rows are still to be ended, one by one.
        """
        keys = [self.key(batch), self.key(batch, "cursor")]
        return bool(self._stop(keys=keys))

    # Rows

    def mark(
        self,
        pipe: Pipeline,
        batch: str,
        index: int,
        mark: Mark,
        lease: tuple[str, str] | None = None,
        tokens: int = 0,
        cached: bool = False,
    ) -> None:
        """Queue on `pipe`: mark a row as ended, once; `tokens` is how many were generated for its output.

        `lease` is a sorted set and the member that must be in it; a worker that lost its lease marks nothing.
        The pipeline's answer is 1 when this call ended the row, 0 when it had ended before, -1 when the lease is lost.
        """
        keys = [*self.mark_keys(batch), self.key(batch, "starts")]
        fence = list(lease) if lease else ["", ""]
        place = list(Mark).index(mark) + 1
        keys += [fence[0] or keys[0], self.key(batch)]
        self._mark(keys=keys, args=[index, place, fence[1], tokens, int(cached)], client=pipe)

    def marks(self, rows: Sequence[tuple[str, int]]) -> list[Mark | None]:
        """How each (batch, index) ended, or None for those that have not; one round trip."""
        with self.redis.pipeline(transaction=False) as pipe:
            for batch, index in rows:
                for mark in Mark:
                    pipe.getbit(self.key(batch, mark), index)
            bits = iter(pipe.execute())
        found = zip(bits, bits, bits, strict=True)
        return [next((mark for mark, bit in zip(Mark, row, strict=True) if bit), None) for row in found]

    def end_start(self, pipe: Pipeline, batch: str, index: int) -> None:
        """Queue on `pipe`: the row came to an orderly end or was given back; it is no suspect any more."""
        pipe.hdel(self.key(batch, "starts"), str(index))

    def bitmap(self, batch: str, mark: Mark) -> bytes:
        """The batch's bits of one mark, most significant bit first in each byte, as Redis keeps them."""
        return cast("bytes | None", self.redis.get(self.key(batch, mark))) or b""

    def bitmaps(self, batch: str) -> dict[Mark, bytes]:
        """All of the batch's bitmaps at one moment."""
        found = cast("list[bytes | None]", self.redis.mget(self.mark_keys(batch)))
        return {mark: bits or b"" for mark, bits in zip(Mark, found, strict=True)}

    def reopen(
        self, batch: str, indices: Iterable[int], enqueue: Callable[[Pipeline], None], mark: Mark = Mark.FAILED
    ) -> None:
        """Take back the marks of `indices`, all of which are `mark`, and enqueue those rows again, all or nothing."""
        submitted = self.redis.hexists(self.key(batch), "total")  # while its source is being read, that goes on
        with self.redis.pipeline(transaction=True) as pipe:
            for index in indices:
                pipe.setbit(self.key(batch, mark), index, 0)
                self.end_start(pipe, batch, index)
            if submitted:
                pipe.hset(self.key(batch), "state", BatchState.RUNNING)
            pipe.hdel(self.key(batch), "finished_at", "cancelled_at")
            pipe.sadd(self._names.key("open"), batch)
            enqueue(pipe)
            pipe.execute()

    def lose(self, batch: str, indices: Iterable[int]) -> None:
        """Turn done marks into failed ones: the outputs of `indices` were lost from the disk before publishing."""
        with self.redis.pipeline(transaction=True) as pipe:
            for index in indices:
                pipe.setbit(self.key(batch, Mark.DONE), index, 0)
                pipe.setbit(self.key(batch, Mark.FAILED), index, 1)
            pipe.execute()


# KEYS the batch's hash, all batches, those not published, contents, those of its owner if it has one; ARGV the batch,
# its spec, creation time, hours and content ('' for none).
_CREATE = """
if redis.call('HSETNX', KEYS[1], 'spec', ARGV[2]) == 0 then return 0 end
if ARGV[5] ~= '' then redis.call('HSET', KEYS[4], ARGV[5], ARGV[1]) end
redis.call('HSET', KEYS[1], 'state', 'submitting')
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'hours', ARGV[4]) end
if KEYS[5] then redis.call('ZADD', KEYS[5], ARGV[3], ARGV[1]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[1])
return 1
"""

# KEYS the bitmap of each mark, starts, lease set, the batch's hash; ARGV index, number of the mark, lease member (''
# for none), tokens of the output, 1 for an answer from the cache.
_MARK = """
if ARGV[3] ~= '' and not redis.call('ZSCORE', KEYS[5], ARGV[3]) then return -1 end
redis.call('HDEL', KEYS[4], ARGV[1])
for mark = 1, 3 do
    if redis.call('GETBIT', KEYS[mark], ARGV[1]) == 1 then return 0 end
end
redis.call('SETBIT', KEYS[tonumber(ARGV[2])], ARGV[1], 1)
if redis.call('HEXISTS', KEYS[6], 'spec') == 1 then
    local clock = redis.call('TIME')
    redis.call('HSET', KEYS[6], 'ended_at', clock[1] + clock[2] / 1e6)
    if ARGV[4] ~= '0' then redis.call('HINCRBY', KEYS[6], 'output_tokens', ARGV[4]) end
    if ARGV[5] == '1' then redis.call('HINCRBY', KEYS[6], 'cached', 1) end
end
return 1
"""

# KEYS the batch's hash, all batches, those not published, output names, contents, then its other keys; ARGV the batch,
# its output name and its content.
_FORGET = """
if redis.call('HGET', KEYS[1], 'state') ~= 'done' then return 0 end
for place = 4, 5 do
    local name = ARGV[place - 2]
    if redis.call('HGET', KEYS[place], name) == ARGV[1] then redis.call('HDEL', KEYS[place], name) end
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('SREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[1], unpack(KEYS, 6))
return 1
"""

# KEYS the batch's hash and cursor.
_STOP = """
local state = redis.call('HGET', KEYS[1], 'state')
if not state or state == 'done' then return 0 end
local clock = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'cancelled_at', clock[1] + clock[2] / 1e6)
if redis.call('HEXISTS', KEYS[1], 'total') == 0 then
    local cursor = redis.call('GET', KEYS[2])
    redis.call('HSET', KEYS[1], 'state', 'running', 'unread', 1, 'total', cursor and cjson.decode(cursor).index or 0)
end
return 1
"""

# KEYS those not published; ARGV patterns of the keys of a batch's hash and of its bitmaps.
_GLANCE = """
local function ended(batch)
    local count = 0
    for mark = 2, 4 do count = count + redis.call('BITCOUNT', string.format(ARGV[mark], batch)) end
    return count
end

local found = {}
for _, batch in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local record = redis.pcall('HMGET', string.format(ARGV[1], batch), 'state', 'total')
    if not record.err and record[1] then
        local total, complete = tonumber(record[2] or ''), '0'
        if total then
            local sound, count = pcall(ended, batch)
            if sound and count >= total then complete = '1' end
        end
        found[#found + 1] = {batch, record[1], complete}
    end
end
return found
"""


def _batch(
    batch: str, fields: dict[bytes, bytes], cursor: bytes | None, done: int, failed: int, cancelled: int
) -> Batch:
    spec = BatchSpec.model_validate_json(fields[b"spec"])
    if spec.batch != batch:
        raise ValueError(f"it says that it is {spec.batch}")
    processed = _text(fields[b"processed"]) if b"processed" in fields else None
    if processed is not None and not all(map(is_plain, processed.split("/"))):
        raise ValueError("its source is said to lie outside its folder")
    total = fields.get(b"total")
    times = {name: _time(fields, name) for name in ("started_at", "ended_at", "finished_at", "cancelled_at")}
    return Batch(
        spec=spec,
        state=BatchState(_text(fields[b"state"])),
        counts=Counts(
            total=None if total is None else int(total),
            submitted=_cursor(cursor).index,
            done=done,
            failed=failed,
            cancelled=cancelled,
        ),
        output_tokens=int(fields.get(b"output_tokens", 0)),
        cached=int(fields.get(b"cached", 0)),
        processed=processed,
        unread=b"unread" in fields,
        **times,
    )


def _time(fields: dict[bytes, bytes], name: str) -> float | None:
    value = fields.get(name.encode())
    return None if value is None else float(value)


def _cursor(value: Any) -> Cursor:
    return Cursor.model_validate_json(value) if value else Cursor()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
