"""Ledger, queue and segments under any order of events: each row is in exactly one place, and every count adds up.

Hypothesis chooses what happens: files are submitted chunk by chunk, prompts taken, answered, failed, tried again and
given back; workers die or stand still and wake up; rows are lost, batches cancelled, retried and published; producers,
cancellers and sealers die halfway; the server is restarted. The parts are the real ones on a real server, without the
threads that would do by the clock what is done here in every order. Beside them a plain model says what each row must
be; after every step all of Redis is compared with it, and after every publishing the files are.

In the end everybody is left in peace, and every batch must come to be published.

`STATE_MACHINE=thorough` plays many more and longer games, each time others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job

from contract import cancelling, claimed, paths, sealing, server
from contract.errors import BadPrompt, PromptFailure, UsageError
from contract.hours import Hours
from contract.jobs import PRIORITIES, ErrorCode, ErrorDetail, ErrorRow
from contract.ledger import BatchSpec, BatchState, Counts, Ledger, Mark
from contract.merging import set_bits
from contract.paths import Folders
from contract.queues import connect, queue, queues
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims, Look
from producer.submitter import Progress, Submission
from tests.conftest import completion_row, wait_for
from worker.intake import Intake, Rejected, Taken
from worker.outputs import Outputs

THOROUGH = os.environ.get("STATE_MACHINE") == "thorough"
PROFILE = settings(
    max_examples=400 if THOROUGH else 40,
    stateful_step_count=80 if THOROUGH else 30,
    derandomize=not THOROUGH,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
CHUNK = 2
MAX_QUEUED = 6
MAX_ATTEMPTS = 2
BATCHES = 4
WORKERS = 3
PEACE = 60
"""Rounds in which everything must have ended once nothing happens any more."""

ACTS = ["take", "take", "take", "answer", "answer", "settle", "settle", "fail", "give_back", "heartbeat"]
ACTS += ["stand_still", "stand_still", "scan", "scan", "kill", "leave"]
STORIES = [
    ["take", "answer", "stand_still", "scan", "settle"],
    ["take", "stand_still", "scan", "take", "fail", "give_back", "heartbeat"],
    ["take", "kill", "scan", "take", "kill", "scan", "take", "kill", "scan", "take", "settle"],
]
"""Orders that chance finds too seldom."""
FAILURES = [BadPrompt(ErrorCode.PROMPT_TOO_LONG, "too long"), PromptFailure(ErrorCode.MODEL_ERROR, "it failed")]
some = st.integers(0, 7)
"""Which of those that there are: taken modulo their number."""


class Server:
    """A server that can be restarted, with what it knew."""

    def __init__(self, folder: Path) -> None:
        socket = folder / "s"
        self.url = f"unix://{socket}"
        where = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
        self._command = [str(server.find_binary()), *where]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with contextlib.closing(Redis.from_url(self.url)) as probe:
            wait_for(lambda: self._answers(probe))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self, redis: Redis) -> None:
        redis.save()
        self.kill()
        self.start()

    @staticmethod
    def _answers(probe: Redis) -> bool:
        with contextlib.suppress(RedisError):
            return bool(probe.ping())
        return False


class Death(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def dying(owner: Any, name: str, call: int, after: bool) -> Iterator[list[int]]:
    """The process dies at the `call`-th call of a step, before or after its effect; holds 1 if it came to that."""
    step, calls, died = getattr(owner, name), itertools.count(), []

    def mortal(*args: Any, **values: Any) -> Any:
        if next(calls) != call:
            return step(*args, **values)
        if after:
            step(*args, **values)
        died.append(1)
        raise Death

    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(Death):
        patched.setattr(owner, name, mortal)
        yield died


# The model


class At(Enum):
    """Where a row is, in the model."""

    UNREAD = "not submitted"
    BACKLOG = "backlog"
    LIST = "list"
    INTERMEDIATE = "intermediate"
    STARTED = "started"
    SCHEDULED = "scheduled"
    NOWHERE = "lost"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


WAITING = (At.BACKLOG, At.LIST)
ENDED = (At.DONE, At.FAILED, At.CANCELLED)


@dataclass
class Row:
    """One row as it must be. `starts` are those that did not end; `late` says that its lease or delay has run out."""

    index: int
    readable: bool
    at: At = At.UNREAD
    late: bool = False
    holder: str = ""
    attempts: int = 0
    starts: int = 0
    job: bool = False
    shown_id: str = ""
    codes: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return self.at in ENDED

    def move(self, to: At, starts: int | None = None) -> None:
        self.at, self.late, self.holder = to, False, ""
        self.starts = self.starts if starts is None else starts

    def end(self, how: At, code: ErrorCode | None = None, job: bool = False) -> None:
        self.move(how, starts=0)
        self.job, self.shown_id = job, f"id-{self.index}"
        if code:
            self.codes = self.codes | {code}


@dataclass
class Batch:
    """One batch as it must be."""

    spec: BatchSpec
    content: bytes
    rows: list[Row]
    open: bool
    submitted: int = 0
    total: int | None = None
    published: bool = False
    cancelled: bool = False
    submission: Submission | None = None
    answers: dict[str, str] = field(default_factory=dict)
    """What was published already, by id."""

    @property
    def id(self) -> str:
        return self.spec.batch

    @property
    def complete(self) -> bool:
        return self.total is not None and all(row.ended for row in self.rows[: self.total])

    @property
    def left(self) -> list[Row]:
        return [row for row in self.rows[: self.submitted] if not row.ended]

    def state(self) -> BatchState:
        if self.published:
            return BatchState.DONE
        return BatchState.SUBMITTING if self.total is None else BatchState.RUNNING

    def count(self, at: At) -> int:
        return sum(row.at is at for row in self.rows[: self.submitted])


@dataclass
class Worker:
    """A worker, and what its loop holds: rows that run, rows whose output is written, and what it must refuse."""

    intake: Intake
    outputs: Outputs
    running: list[Taken] = field(default_factory=list)
    written: list[Taken] = field(default_factory=list)
    refused: list[Rejected] = field(default_factory=list)

    def started(self) -> list[Taken]:
        return [*self.running, *self.written]

    def drop(self, gone: Sequence[Taken]) -> None:
        ids = {row.lease.execution_id for row in gone}
        self.running = [row for row in self.running if row.lease.execution_id not in ids]
        self.written = [row for row in self.written if row.lease.execution_id not in ids]


class Machine(RuleBasedStateMachine):
    """One game: a fresh root, an empty server."""

    def __init__(self, own: Server) -> None:
        super().__init__()
        self.server = own
        self.root = Path(tempfile.mkdtemp(prefix="dllm-machine-"))
        self.folders = Folders(self.root).create()
        self.redis = connect(own.url)
        self.redis.flushall()
        self.ledger = Ledger(self.redis)
        self.batches: dict[str, Batch] = {}
        self.workers: list[Worker] = []
        self.numbers = itertools.count()
        self.restarts = self.cancels = 0

    @initialize()
    def begin(self) -> None:
        """So that there is something to do from the first step on."""
        self.claim([True] * 5, "normal", closed=False, dropped=True)
        self.submit(0, None, chunks=2)
        self.worker_starts()
        self.worker_starts()

    # Producers

    @precondition(lambda self: len(self.batches) < BATCHES)
    @rule(
        readable=st.lists(st.sampled_from([True, True, True, False]), max_size=7),
        priority=st.sampled_from(PRIORITIES),
        closed=st.sampled_from([False, False, True]),
        dropped=st.booleans(),
    )
    def claim(self, readable: list[bool], priority: str, closed: bool, dropped: bool) -> None:
        """A file of always the same name."""
        claims = Claims(self.producer(priority=priority, not_before="+999d" if closed else None), self.ledger)
        content = "".join(
            json.dumps({"id": f"id-{index}", "prompt": f"{len(self.batches)} {index}" if good else ""}) + "\n"
            for index, good in enumerate(readable)
        ).encode()
        file = (self.folders.inputs if dropped else self.root) / "in.jsonl"
        file.write_bytes(content)
        spec = claims.take(file, Look.at(file)) if dropped else claims.snapshot(file)
        assert spec is not None
        rows = [Row(index, good, shown_id=f"id-{index}") for index, good in enumerate(readable)]
        self.batches[spec.batch] = Batch(spec, content, rows, open=not closed)

    @precondition(lambda self: self.submitting())
    @rule(which=some, death=st.sampled_from([None, None, "before", "after"]), chunks=st.integers(1, 4))
    def submit(self, which: int, death: str | None, chunks: int) -> None:
        """Some chunks of a batch; in the last one the producer may die."""
        batch = pick(self.submitting(), which)
        for chunk in range(chunks):
            if batch in self.submitting():
                self.submit_chunk(batch, death if chunk == chunks - 1 else None)

    def submit_chunk(self, batch: Batch, death: str | None) -> None:
        submission = batch.submission or Submission(batch.spec, self.ledger, self.producer())
        progress = None
        with dying(Ledger, "advance", 0 if death else -1, death == "after") as died:
            progress = submission.step()
        if died:
            submission.close()
        batch.submission = None if died or progress in (Progress.FINISHED, Progress.LET_GO) else submission
        record = self.ledger.get(batch.id)
        assert record is not None
        new = record.counts.submitted
        assert new - batch.submitted <= CHUNK
        for row in batch.rows[batch.submitted : new]:
            if row.readable:
                row.move(At.BACKLOG)
                row.job = True
            else:
                row.end(At.FAILED, ErrorCode.EMPTY_PROMPT)
        if died and death == "before":
            assert new == batch.submitted
        elif progress is Progress.ADVANCED:
            assert new > batch.submitted
        batch.submitted = new
        assert len(batch.left) <= MAX_QUEUED
        assert progress is not Progress.FULL or batch.left
        if batch.total is not None:  # it was cancelled meanwhile
            assert progress is Progress.LET_GO
        elif record.counts.total is not None:
            assert progress is Progress.FINISHED or died
            assert new == len(batch.rows)
            batch.total = new
        if progress is Progress.FINISHED:
            self.seals(batch)

    @precondition(lambda self: any(not batch.open for batch in self.batches.values()))
    @rule(which=some)
    def window_opens(self, which: int) -> None:
        batch = pick([batch for batch in self.batches.values() if not batch.open], which)
        target = queue(self.redis, "demo", batch.spec.priority)
        self.redis.hset(self.ledger.key(batch.id), "hours", Hours(not_before=1.0).model_dump_json())
        self.redis.zadd(self.redis.names.hours(target.name), {batch.id: 0}, xx=True)
        batch.open = True

    # Workers

    @precondition(lambda self: len(self.workers) < WORKERS)
    @rule()
    def worker_starts(self) -> None:
        values: dict[str, Any] = {"lease_s": 1000, "scan_s": 1000, "linger_ms": 0, "max_attempts": MAX_ATTEMPTS}
        values |= {"retry_base_s": 1000, "retry_max_s": 1000, "name": f"w{next(self.numbers)}"}
        intake = Intake(self.redis, self.ledger, WorkerSettings(root=self.root, redis_url=self.server.url, **values))
        self.workers.append(Worker(intake, Outputs(self.folders, self.ledger, intake.name)))

    @precondition(lambda self: self.workers)
    @rule(
        which=some,
        number=some,
        acts=st.lists(st.sampled_from(ACTS), min_size=2, max_size=10) | st.sampled_from(STORIES),
    )
    def work(self, which: int, number: int, acts: list[str]) -> None:
        """What workers do and what happens to them, in any order; they change from act to act with `number`."""
        for place, act in enumerate(acts):
            worker = pick(self.workers, which + place * (number % 2))
            getattr(self, act)(worker, number + place)
            self.hold()
            if not self.workers:
                break

    def take(self, worker: Worker, number: int) -> None:
        room = 1 + number % 4
        before = {row.lease.execution_id for row in worker.intake.held()}
        idle = not before and not worker.refused
        runnable = [row for row in self.all_rows() if self.may_run(row)]
        given = worker.intake.take(room)
        refused = worker.intake.rejected()
        held = [row for row in worker.intake.held() if row.lease.execution_id not in before]
        for batch, row in self.rows_at(At.SCHEDULED):  # those that are due are queued by whoever takes
            scheduled = self.target(batch).scheduled_job_registry.key
            if row.late and self.redis.zscore(scheduled, job_id(batch, row)) is None:
                row.move(At.LIST)
        for taken in [*held, *refused]:
            batch, row = self.found(taken)
            assert row.at in WAITING
            assert row.at is At.LIST or batch.open
            row.move(At.STARTED)
            row.holder = taken.lease.execution_id
            if isinstance(taken, Taken):
                assert (taken.attempt, taken.suspect, taken.job.id) == (row.attempts + 1, row.starts, row.shown_id)
            else:
                assert (taken.error.code, row.starts) == (ErrorCode.WORKER_CRASHED, 3)
        for taken in given:
            _, row = self.found(taken)
            assert row.holder == taken.lease.execution_id
            row.starts += 1
        if idle or held or refused:
            assert len(held) + len(refused) == min(room, len(runnable))
            self.urgent_first([*held, *refused])
        worker.running += given
        worker.refused += refused

    def answer(self, worker: Worker, number: int) -> None:
        """Outputs reach the disk; nobody else knows yet."""
        rows = worker.running[: 1 + number]
        outputs = []
        for taken in rows:
            text = f"{worker.intake.name} {next(self.numbers)}"
            self.found(taken)[1].texts.add(text)
            outputs.append((taken.batch, completion_row(taken.index, text, id=taken.job.id)))
        worker.outputs.write(outputs)
        worker.written += rows
        worker.running = [row for row in worker.running if row not in rows]

    def settle(self, worker: Worker, number: int) -> None:
        """What is written is finished, what was refused is failed; then the worker may publish, or get no further."""
        ours = [taken for taken in worker.written if self.is_ours(taken)]
        assert worker.intake.finish(worker.written) == len(ours)
        for taken in ours:
            self.found(taken)[1].end(At.DONE)
        batches = {taken.batch for taken in [*worker.written, *worker.refused]}
        worker.written = []
        while worker.refused:
            self.fail_row(worker, worker.refused.pop(), None)
        if number % 4 == 3:
            worker.outputs.sealed_if_complete(batches)
            for batch in batches:
                self.seals(self.batches[batch])

    def fail(self, worker: Worker, number: int) -> None:
        """One row gets another attempt where there is one, else an error row."""
        if not worker.running:
            return
        taken, error = pick(worker.running, number), FAILURES[number % len(FAILURES)]
        worker.drop([taken])
        if worker.intake.will_retry(taken, error):
            assert isinstance(error, PromptFailure)
            assert taken.attempt < MAX_ATTEMPTS
            ours, found = self.is_ours(taken), self.found(taken)[1]
            assert worker.intake.retry(taken, error) == ours
            if ours:
                found.move(At.SCHEDULED, starts=0)
                found.attempts = taken.attempt
        else:
            assert isinstance(error, BadPrompt) or taken.attempt >= MAX_ATTEMPTS
            self.fail_row(worker, taken, error)

    def fail_row(self, worker: Worker, taken: Taken | Rejected, error: Any) -> None:
        ours, (batch, row) = self.is_ours(taken), self.found(taken)
        if isinstance(taken, Rejected):
            written, code = taken.error_row(worker.intake.name), ErrorCode.WORKER_CRASHED
        else:
            code = ErrorCode(error.code)
            detail = ErrorDetail(code=code, message=str(error))
            written = ErrorRow(index=row.index, id=taken.job.id, line=row.index + 1, prompt="", error=detail)
        worker.outputs.write([(batch.id, written)])
        assert worker.intake.fail(taken, error) == ours
        row.codes = row.codes | {code}
        if ours:
            row.end(At.FAILED, code, job=True)

    def give_back(self, worker: Worker, _: int) -> None:
        held, started = worker.intake.held(), worker.started()
        ours = [taken for taken in held if self.is_ours(taken)]
        assert worker.intake.give_back(held) == len(ours)
        for taken in ours:
            row = self.found(taken)[1]
            row.move(At.LIST, starts=row.starts - (taken in started))
        worker.drop(held)

    def heartbeat(self, worker: Worker, _: int) -> None:
        """A worker that stood still finds what others have by now; what nobody took is its own again."""
        gone = [taken for taken in worker.intake.held() if not self.is_ours(taken)]
        worker.intake._beat()
        lost = worker.intake.lost()
        assert {taken.lease.execution_id for taken in lost} == {taken.lease.execution_id for taken in gone}
        worker.drop(lost)
        for taken in [*worker.intake.held(), *worker.refused]:
            if self.is_ours(taken):
                self.found(taken)[1].late = False

    def stand_still(self, worker: Worker, _: int = 0) -> None:
        """For longer than its leases; it may go on at any time."""
        for taken in [*worker.intake.held(), *worker.refused]:
            if self.is_ours(taken):
                self.redis.zadd(taken.lease.lane.started, {taken.lease.member: 1}, xx=True)
                self.found(taken)[1].late = True

    def kill(self, worker: Worker, number: int) -> None:
        """It may have been writing at that moment."""
        torn = bool(number % 2)
        self.stand_still(worker)
        worker.outputs.close()
        for segment in self.folders.segments.glob(f"*/{worker.intake.name}.jsonl") if torn else ():
            with segment.open("ab") as stream:
                stream.write(b'{"index":0,"id":"id-0","output":"half a r')
        self.workers.remove(worker)

    def leave(self, worker: Worker, number: int) -> None:
        """In order, or by an error; after an error starts stay counted."""
        crashed = bool(number % 2)
        ours = [taken for taken in [*worker.intake.held(), *worker.refused] if self.is_ours(taken)]
        started = worker.started()
        error = RuntimeError("the device is gone") if crashed else None
        worker.intake.__exit__(type(error) if error else None, error, None)
        worker.outputs.close()
        for taken in ours:
            row = self.found(taken)[1]
            row.move(At.LIST, starts=row.starts - (taken in started and not crashed))
        self.workers.remove(worker)

    # Time, the server, foreign hands

    @precondition(lambda self: self.rows_at(At.SCHEDULED))
    @rule()
    def retries_fall_due(self) -> None:
        for batch, row in self.rows_at(At.SCHEDULED):
            self.redis.zadd(self.target(batch).scheduled_job_registry.key, {job_id(batch, row): 1}, xx=True)
            row.late = True

    @precondition(lambda self: self.restarts < 1 and self.batches)
    @rule()
    def server_restarts(self) -> None:
        self.restarts += 1
        self.server.restart(self.redis)

    @precondition(lambda self: self.rows_at(*WAITING))
    @rule(which=some, job_too=st.booleans())
    def lose(self, which: int, job_too: bool) -> None:
        """A foreign tool empties a list, maybe with the jobs."""
        batch, row = pick(self.rows_at(*WAITING), which)
        assert self.redis.lrem(self.list_of(batch, row), 1, job_id(batch, row)) == 1
        if job_too:
            self.redis.delete(Job.key_for(job_id(batch, row)))
            row.job = False
        row.move(At.NOWHERE)

    @precondition(lambda self: self.rows_at(*WAITING))
    @rule(which=some)
    def strand(self, which: int) -> None:
        """A row is left between queue and registry, long ago."""
        batch, row = pick(self.rows_at(*WAITING), which)
        target, name = self.target(batch), job_id(batch, row)
        assert self.redis.lrem(self.list_of(batch, row), 1, name) == 1
        self.redis.rpush(target.intermediate_queue.key, name)
        self.redis.zadd(f"dllm:intermediate:{target.name}", {name: 1})
        row.move(At.INTERMEDIATE)

    # Maintenance

    def scan(self, worker: Worker, _: int) -> None:
        """Two scans of a worker that leads."""
        self.redis.delete("dllm:lock:audit")
        for _ in range(2):
            worker.intake.reconciler.run()
        for _, row in self.rows_at(At.STARTED, At.SCHEDULED, At.INTERMEDIATE):
            if row.late or row.at is At.INTERMEDIATE:
                row.move(At.LIST)
        for batch in self.batches.values():
            if batch.cancelled:
                self.end_cancelled(batch, batch.left)
            self.find_lost(batch)
            self.seals(batch)

    def find_lost(self, batch: Batch) -> None:
        for row in batch.left:
            if row.at is not At.NOWHERE:
                continue
            if row.job:
                row.move(At.BACKLOG)
            elif claimed.source(batch.spec, self.folders).exists():
                row.move(At.BACKLOG)
                row.job, row.attempts = True, 0
            else:
                row.end(At.FAILED, ErrorCode.SOURCE_LOST)
                row.shown_id = str(row.index)

    @precondition(lambda self: any(batch.complete and not batch.published for batch in self.batches.values()))
    @rule(
        which=some,
        death=st.sampled_from([(sealing, "_put_source_away"), (Ledger, "close"), (paths, "publish"), None]),
        call=st.integers(0, 1),
        after=st.booleans(),
    )
    def seal(self, which: int, death: tuple[Any, str] | None, call: int, after: bool) -> None:
        """A producer looks whether the batch is complete; it may die on the way."""
        batch = pick(list(self.batches.values()), which)
        owner, name = death or (Ledger, "close")
        with dying(owner, name, call if death else -1, after) as died:
            sealing.seal(batch.id, self.ledger, self.folders)
        if not died or (name == "close" and after):
            self.seals(batch)

    # People

    @precondition(lambda self: self.cancels < 2)
    @rule(which=some, death=st.sampled_from([None, "stop", "withdraw"]), call=st.integers(0, 1), after=st.booleans())
    def cancel(self, which: int, death: str | None, call: int, after: bool) -> None:
        self.cancels += 1
        batch = pick(list(self.batches.values()), which)
        if batch.published:
            assert cancelling.cancel(batch.id, self.ledger, self.folders).rows == 0
            return
        left = batch.left
        owner = Ledger if death == "stop" else cancelling
        with dying(owner, death or "withdraw", call if death else -1, after) as died:
            assert cancelling.cancel(batch.id, self.ledger, self.folders).rows == len(left)
        if died and death == "stop" and not after:
            return
        batch.cancelled = True
        batch.total = batch.submitted if batch.total is None else batch.total
        if died:
            left = left[: CHUNK * (call + after)] if death == "withdraw" else []
        self.end_cancelled(batch, left)
        if not died:
            self.seals(batch)

    def end_cancelled(self, batch: Batch, rows: Sequence[Row]) -> None:
        for row in rows:
            known = row.job
            row.end(At.CANCELLED, ErrorCode.CANCELLED)
            row.shown_id = row.shown_id if known else str(row.index)

    @precondition(lambda self: any(batch.left for batch in self.batches.values()))
    @rule(which=some, row=some)
    def cancel_row(self, which: int, row: int) -> None:
        batch = pick([batch for batch in self.batches.values() if batch.rows], which)
        chosen = pick(batch.rows, row)
        ended = cancelling.cancel_rows(batch.id, [f"id-{chosen.index}"], self.ledger, self.folders)
        if chosen in batch.left and chosen.job and not batch.published:
            assert (ended.rows, ended.unknown) == (1, [])
            self.end_cancelled(batch, [chosen])
        else:
            assert (ended.rows, ended.unknown) == (0, [f"id-{chosen.index}"])
        self.seals(batch)

    @precondition(lambda self: self.rows_at(At.FAILED))
    @rule(which=some, one=st.booleans(), dies=st.booleans(), call=st.integers(0, 1), after=st.booleans())
    def retry(self, which: int, one: bool, dies: bool, call: int, after: bool) -> None:
        """All failed rows of a batch that have a job, or one of them."""
        batch, chosen = pick(self.rows_at(At.FAILED), which)
        rows = [row for row in batch.rows if row.at is At.FAILED and row.job and (row is chosen or not one)]
        ids = [chosen.shown_id] if one else None
        if batch.cancelled and not batch.complete:
            with pytest.raises(UsageError):
                sealing.retry(batch.id, None, self.ledger, self.folders, self.redis, ids)
            return
        count = None
        with dying(Ledger, "reopen", call if dies else -1, after) as died:
            count = sealing.retry(batch.id, None, self.ledger, self.folders, self.redis, ids)
        assert died or count == len(rows)
        for row in rows[: CHUNK * (call + after)] if died else rows:
            row.move(At.BACKLOG, starts=0)
            row.attempts = 0
            batch.published = batch.cancelled = False

    # What must hold

    @invariant()
    def every_row_is_in_exactly_one_place(self) -> None:
        expected = {
            job_id(batch, row): [row.at.value]
            for batch in self.batches.values()
            for row in batch.left
            if row.at is not At.NOWHERE
        }
        found, backlogs = self.standing()
        assert found == expected
        for batch in backlogs:  # else nobody would ever take its rows
            target = self.target(self.batches[batch])
            keys = self.redis.names.turns(target.name), self.redis.names.hours(target.name)
            assert any(self.redis.zscore(key, batch) is not None for key in keys)

    @invariant()
    def every_count_adds_up(self) -> None:
        known = {record.spec.batch: record for record in self.ledger.get_many(list(self.batches))}
        assert known.keys() == self.batches.keys()
        assert self.ledger.open_batches() == sorted(b.id for b in self.batches.values() if not b.published)
        for batch in self.batches.values():
            record = known[batch.id]
            ended = {mark: batch.count(At(mark.value)) for mark in Mark}
            assert record.counts == Counts(total=batch.total, submitted=batch.submitted, **ended)
            assert batch.submitted == record.counts.ended + len(batch.left)
            assert (record.state, record.cancelled_at is not None) == (batch.state(), batch.cancelled)
            for mark, bits in self.ledger.bitmaps(batch.id).items():
                assert list(set_bits(bits)) == [row.index for row in batch.rows if row.at is At(mark.value)]
            starts = self.redis.hgetall(self.ledger.key(batch.id, "starts"))
            assert {int(index): int(count) for index, count in starts.items()} == {
                row.index: row.starts for row in batch.rows if row.starts
            }

    @invariant()
    def jobs_are_kept_as_long_as_they_are_needed(self) -> None:
        kept = {job_id(batch, row) for batch in self.batches.values() for row in batch.rows if row.job}
        assert {key.decode().removeprefix("rq:job:") for key in self.redis.keys("rq:job:*")} == kept
        failed = {job_id(batch, row) for batch, row in self.rows_at(At.FAILED) if row.job}
        found = [self.redis.zrange(one.failed_job_registry.key, 0, -1) for one in queues(self.redis, "demo")]
        assert sorted(name.decode() for names in found for name in names) == sorted(failed)

    def hold(self) -> None:
        """All of the above, in the middle of a step."""
        self.every_row_is_in_exactly_one_place()
        self.every_count_adds_up()
        self.jobs_are_kept_as_long_as_they_are_needed()

    def seals(self, batch: Batch) -> None:
        """Somebody has just looked whether the batch can be published."""
        if batch.complete and not batch.published:
            batch.published = True
            self.check_published(batch)

    def check_published(self, batch: Batch) -> None:
        """The files hold every row once, in order, and what was published before is as it was."""
        rows = batch.rows[: batch.total]
        outputs = self.lines(f"{batch.spec.output}.jsonl")
        assert [line["id"] for line in outputs] == [row.shown_id for row in rows if row.at is At.DONE]
        for line in outputs:
            assert line["output"] in batch.rows[int(line["id"].removeprefix("id-"))].texts
            assert batch.answers.setdefault(line["id"], line["output"]) == line["output"]
        errors = self.lines(f"{batch.spec.output}.errors.jsonl")
        without = [row for row in rows if row.at is not At.DONE]
        assert [line["id"] for line in errors] == [row.shown_id for row in without]
        for line, row in zip(errors, without, strict=True):
            code = line["error"]["code"]
            assert (code == "cancelled") == (row.at is At.CANCELLED)
            assert code in row.codes

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.be_in_peace()
        finally:
            for worker in self.workers:
                worker.outputs.close()
            for batch in self.batches.values():
                if batch.submission:
                    batch.submission.close()
            self.redis.close()
            shutil.rmtree(self.root)

    def be_in_peace(self) -> None:
        """Nothing happens any more; one worker and one producer do what is left to do."""
        while self.workers:
            self.kill(self.workers[0], 0)
        while any(not batch.open for batch in self.batches.values()):
            self.window_opens(0)
        self.worker_starts()
        for _ in range(PEACE):
            if all(batch.published for batch in self.batches.values()):
                break
            for batch in self.submitting():
                self.submit_chunk(batch, None)
            self.retries_fall_due()
            self.scan(self.workers[0], 0)
            for act in (self.take, self.answer, self.settle):
                act(self.workers[0], 3)
        assert all(batch.published for batch in self.batches.values())
        self.hold()
        sources = [file.read_bytes() for file in self.folders.processed.iterdir()]
        assert sorted(sources) == sorted(batch.content for batch in self.batches.values())
        assert claimed.entries(self.folders) == []

    # Looking things up

    def producer(self, **values: Any) -> ProducerSettings:
        return ProducerSettings(root=self.root, redis_url=self.server.url, max_queued=MAX_QUEUED, **values)

    def submitting(self) -> list[Batch]:
        return [batch for batch in self.batches.values() if batch.total is None or batch.submission]

    def target(self, batch: Batch) -> Any:
        return queue(self.redis, "demo", batch.spec.priority)

    def list_of(self, batch: Batch, row: Row) -> str:
        return self.redis.names.backlog(batch.id) if row.at is At.BACKLOG else self.target(batch).key

    def all_rows(self) -> list[tuple[Batch, Row]]:
        return [(batch, row) for batch in self.batches.values() for row in batch.rows]

    def rows_at(self, *places: At) -> list[tuple[Batch, Row]]:
        return [(batch, row) for batch, row in self.all_rows() if row.at in places]

    def found(self, taken: Taken | Rejected) -> tuple[Batch, Row]:
        batch = self.batches[taken.batch]
        return batch, batch.rows[taken.index]

    def is_ours(self, taken: Taken | Rejected) -> bool:
        """Has nobody else got the row since this taking, nor the queue?"""
        return self.found(taken)[1].holder == taken.lease.execution_id

    def may_run(self, found: tuple[Batch, Row]) -> bool:
        batch, row = found
        due = row.at is At.SCHEDULED and row.late
        return due or row.at is At.LIST or (row.at is At.BACKLOG and batch.open)

    def urgent_first(self, taken: Sequence[Taken | Rejected]) -> None:
        """Nothing less urgent was taken than what was left."""
        least = max((PRIORITIES.index(self.batches[row.batch].spec.priority) for row in taken), default=0)
        left = [PRIORITIES.index(found[0].spec.priority) for found in self.all_rows() if self.may_run(found)]
        assert all(priority >= least for priority in left)

    def standing(self) -> tuple[dict[str, list[str]], list[str]]:
        """The places of every job that stands anywhere, and the batches with a backlog."""
        keys: list[tuple[At, str]] = []
        for target in queues(self.redis, "demo"):
            keys += [(At.LIST, target.key), (At.INTERMEDIATE, target.intermediate_queue.key)]
            keys += [(At.STARTED, target.started_job_registry.key), (At.SCHEDULED, target.scheduled_job_registry.key)]
        keys += [(At.BACKLOG, self.redis.names.backlog(batch)) for batch in self.batches]
        with self.redis.pipeline() as pipe:
            for at, key in keys:
                pipe.zrange(key, 0, -1) if at in (At.STARTED, At.SCHEDULED) else pipe.lrange(key, 0, -1)
            answers = pipe.execute()
        places: dict[str, list[str]] = defaultdict(list)
        for (at, _), members in zip(keys, answers, strict=True):
            for member in members:
                places[member.decode().partition(":")[0]].append(at.value)
        lists = answers[len(answers) - len(self.batches) :]
        return dict(places), [batch for batch, members in zip(self.batches, lists, strict=True) if members]

    def lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folders.outputs / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def pick(among: Sequence[Any], which: int) -> Any:
    return among[which % len(among)]


def job_id(batch: Batch, row: Row) -> str:
    return f"{batch.id}-{row.index}"


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    own = Server(Path(tempfile.mkdtemp(prefix="dllm-")))
    own.start()
    yield own
    own.kill()


@pytest.fixture
def _small_and_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few rows, so that deaths fall between them; nothing waits for the clock, nothing depends on chance."""
    numbers = itertools.count()
    for place, value in {
        "contract.auditing.CONFIRM_S": 0.0,
        "contract.auditing.CANCEL_IDLE_S": 0.0,
        "contract.sealing.SYNCED_S": 0.0,
        "contract.sealing.REOPEN_CHUNK": CHUNK,
        "contract.cancelling.CHUNK": CHUNK,
        "producer.submitter.CHUNK_ROWS": CHUNK,
        "producer.claims.secrets.token_hex": lambda _: f"{next(numbers):08x}",
        "worker.intake.random.uniform": lambda low, high: high,
    }.items():
        monkeypatch.setattr(place, value)


@pytest.mark.usefixtures("_small_and_at_once")
def test_every_row_is_in_one_place_and_every_count_adds_up_whatever_happens(own_server: Server) -> None:
    with structlog.testing.capture_logs():
        run_state_machine_as_test(lambda: Machine(own_server), settings=PROFILE)
