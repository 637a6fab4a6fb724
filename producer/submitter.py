"""From a claimed source into Redis, a chunk at a time, as fast as the workers make room.

Third stage of a prompt's life. The ledger's cursor is the only memory: a chunk's jobs, its failed marks and the new
cursor reach Redis in one transaction, so that a producer that dies at any point is continued without a row lost or
queued twice. Unreadable rows are durable in this producer's segment before they are marked. Memory is one chunk.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import BinaryIO

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import LockError, OutOfMemoryError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from contract import claimed, logs, paths, queues, sealing, stores
from contract.jobs import ErrorRow, PromptJob
from contract.ledger import LOCK_S, BatchSpec, BatchState, Counts, Cursor, Ledger
from contract.parser import Parsed, parse
from contract.ranges import written
from contract.settings import ProducerSettings
from contract.stores import Segment

CHUNK_ROWS = 500
CHUNK_BYTES = 1 << 20
POLL_S = 0.1
LONGEST_PAUSE_S = 15.0

OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError)
"""What passes when the server is back or has room again."""


class Progress(Enum):
    """What a step of a submission came to."""

    ADVANCED = "a chunk was queued"
    FULL = "enough of the batch stands in Redis"
    FINISHED = "the source was submitted to its end"
    LET_GO = "somebody else has the batch, or we were told to stop"


@dataclass
class Chunk:
    """Rows that enter Redis together."""

    cursor: Cursor
    jobs: list[PromptJob] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    last: bool = True

    @property
    def rows(self) -> int:
        return len(self.jobs) + len(self.errors)

    def add(self, parsed: Parsed) -> None:
        if isinstance(parsed.row, PromptJob):
            self.jobs.append(parsed.row)
        else:
            self.errors.append(parsed.row)
        self.cursor = parsed.cursor


class Submission:
    """One batch on its way: its lock, its open source, its place in it. Nothing here sleeps; `step` until done."""

    def __init__(
        self, spec: BatchSpec, ledger: Ledger, settings: ProducerSettings, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.spec = spec
        self.cursor = Cursor()
        self._ledger = ledger
        self._settings = settings
        self._stop = stop
        self._folders = settings.folders
        self._lock = ledger.lock(spec.batch, "submit")
        self._renewed = 0.0
        self._source: BinaryIO | None = None
        self._rows: Generator[Parsed, None, None] = _no_rows()
        self._queue = queues.queue(ledger.redis, spec.model, spec.priority)
        self._errors: Segment | None = None

    def step(self) -> Progress:
        """Submit one chunk if there is room. After FINISHED and LET_GO the submission is closed.

        Raises one of OUTAGES, or OSError when the source or the segment fails; close it then and begin anew later.
        """
        try:
            progress = self._step() if self._hold() else Progress.LET_GO
        except _Stopped:
            progress = Progress.LET_GO
        if progress in (Progress.FINISHED, Progress.LET_GO):
            self.close()
        if progress is Progress.FINISHED:
            _seal_if_complete(self.spec, self._ledger, self._settings)
        return progress

    def close(self) -> None:
        """Let go of the batch, for anybody to go on with."""
        if self._source is not None:
            self._rows.close()  # its list of ids would else stay until it is collected, maybe in another thread
            self._source.close()
            self._source = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        with contextlib.suppress(RedisError):
            if self._lock.owned():
                self._lock.release()

    def _step(self) -> Progress:
        batch = self._ledger.get(self.spec.batch)
        if batch is None or batch.state is not BatchState.SUBMITTING:
            return Progress.LET_GO
        cursor = self.cursor if self._source else self._ledger.cursor(self.spec.batch)
        room = Room.of(batch.counts, cursor, self._settings, opened=self._source is not None)
        if not room.enough:
            return Progress.FULL
        if self._source is None:
            self._open()
        chunk = self._read(room)
        self._keep_errors(chunk.errors)
        failed = [row.index for row in chunk.errors]
        enqueue = queues.enqueuing(self._queue, chunk.jobs)
        if not self._ledger.advance(self.spec.batch, self.cursor, chunk.cursor, failed, enqueue, chunk.last):
            return Progress.LET_GO
        self._tell(chunk, failed)
        self.cursor = chunk.cursor
        return self._finished() if chunk.last else Progress.ADVANCED

    def _tell(self, chunk: Chunk, failed: list[int]) -> None:
        if chunk.rows:
            indices = {self.spec.batch: written(range(self.cursor.index, chunk.cursor.index))}
            logs.get(batch=self.spec.batch).info("rows_submitted", indices=indices, unreadable=written(failed))

    def _finished(self) -> Progress:
        log = logs.get(batch=self.spec.batch)
        if self.cursor.index == 0:
            log.warning("batch_empty", file=self.spec.source)
        log.info("batch_submitted", rows=self.cursor.index)
        return Progress.FINISHED

    def _open(self) -> None:
        self.cursor = self._ledger.cursor(self.spec.batch)
        self._source = paths.opened(claimed.source(self.spec, self._folders), CHUNK_BYTES)
        limit = self._settings.max_line_mb << 20
        self._rows = parse(self._source, self.spec, self.cursor, limit, self._tick)
        if self.cursor.index:
            logs.get(batch=self.spec.batch).info("submitting_resumed", row=self.cursor.index)

    def _read(self, room: Room) -> Chunk:
        chunk = Chunk(self.cursor)
        for parsed in self._rows:
            chunk.add(parsed)
            if chunk.rows >= room.rows or chunk.cursor.offset - self.cursor.offset >= room.size:
                chunk.last = False
                break
        return chunk

    def _keep_errors(self, rows: list[ErrorRow]) -> None:
        if self._errors is None:
            store = stores.of(self._folders, self.spec)
            self._errors = store.segment(self.spec.batch, f"producer-{socket.gethostname()}-{os.getpid()}")
        now = round(time.time(), 3)  # reading a row twice gives the same row; when it failed is said here
        details = [row.error.model_copy(update={"at": now}) for row in rows]
        self._errors.append([row.model_copy(update={"error": one}) for row, one in zip(rows, details, strict=True)])

    def _hold(self) -> bool:
        """Take the batch's lock, or keep it."""
        self._renewed = time.monotonic()
        if self._lock.local.token is not None:
            with contextlib.suppress(LockError):
                return self._lock.reacquire()
        return self._source is None and self._lock.acquire()

    def _tick(self) -> None:
        """Called for every line read: keeps the lock through long stretches that yield no row."""
        if time.monotonic() - self._renewed > LOCK_S / 3:
            if self._stop() or not self._hold():
                raise _Stopped
            self._renewed = time.monotonic()


@dataclass(frozen=True)
class Room:
    """How much of a batch may enter Redis now."""

    rows: int
    size: int
    enough: bool

    @staticmethod
    def of(counts: Counts, cursor: Cursor, settings: ProducerSettings, opened: bool) -> Room:
        """What `max_queued` and `max_queued_mb` leave, judged by the average row so far; one chunk at most.

        Room for less than a chunk (half of the limit where that is smaller) is not enough: many tiny chunks would
        cost more than waiting. To open a source, and maybe read it again from its start, takes room for half of the
        limit. A batch with nothing outstanding always has room.
        """
        outstanding = counts.submitted - counts.ended
        most = settings.max_queued_mb << 20
        rows = settings.max_queued - outstanding
        size = most - outstanding * cursor.offset // max(1, cursor.index)
        half = -(-settings.max_queued // 2), most // 2
        least = (min(CHUNK_ROWS, half[0]), min(CHUNK_BYTES, half[1])) if opened else half
        fits = rows >= least[0] and size >= least[1]
        return Room(min(CHUNK_ROWS, rows), min(CHUNK_BYTES, size), fits or outstanding <= 0)


class _Stopped(Exception):
    """Leaves the middle of a file."""


OnProgress = Callable[[Cursor, Progress], None]


def submit(
    spec: BatchSpec,
    ledger: Ledger,
    settings: ProducerSettings,
    on_progress: OnProgress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Submit a claimed batch to its end, waiting for room and through outages; False when stopped before.

    Another process may do part of the work: what counts is that the batch is submitted.
    """
    submission: Submission | None = None
    outages = 0
    try:
        while not stop():
            try:
                submission = submission or Submission(spec, ledger, settings, stop)
                progress = submission.step()
                if progress is Progress.LET_GO:
                    submission = None
                    if _submitted(spec, ledger):
                        return True
                outages = 0
            except OUTAGES as error:
                _close(submission)
                submission, outages = None, outages + 1
                wait(pause_after(outages, error), stop)
                continue
            if on_progress and submission:
                on_progress(submission.cursor, progress)
            if progress is Progress.FINISHED:
                return True
            if progress is not Progress.ADVANCED:
                wait(POLL_S, stop)
        return False
    finally:
        _close(submission)


def pause_after(outages: int, error: Exception) -> float:
    """Seconds to wait before the next try, growing with the tries in vain; says so in the log."""
    pause = min(LONGEST_PAUSE_S, 0.25 * 2.0**outages)
    logs.get().warning("redis_away", reason=str(error), seconds=pause)
    return pause


def wait(seconds: float, stop: Callable[[], bool]) -> None:
    """Sleep, but not through a stop."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not stop():
        time.sleep(min(left, POLL_S))


def _submitted(spec: BatchSpec, ledger: Ledger) -> bool:
    """Is there nothing left to submit? A batch that the ledger has lost is recorded again."""
    batch = ledger.get(spec.batch)
    if batch is None:
        ledger.create(spec)
        return False
    return batch.state is not BatchState.SUBMITTING


def _seal_if_complete(spec: BatchSpec, ledger: Ledger, settings: ProducerSettings) -> None:
    """Rows that ended before the total was known found nobody to publish them."""
    batch = ledger.get(spec.batch)
    if batch and batch.counts.complete:
        sealing.seal(spec.batch, ledger, settings.folders)


def _no_rows() -> Generator[Parsed, None, None]:
    yield from ()


def _close(submission: Submission | None) -> None:
    if submission is not None:
        submission.close()
