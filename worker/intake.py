"""Where a prompt enters the worker and where it leaves it: jobs are taken from RQ, leased, and ended.

With `lanes.py` and `reconciler.py` all of the worker that knows rq. RQ's own worker runs one job per process; this one
holds many at once in the process in which the model lives, so it takes RQ's place between the queue and the job: no
fork, no SIGALRM.

Every change of a job's state is one Lua script or one transaction, and every one that ends a lease is fenced: it does
nothing when the row's execution has left RQ's started registry, because then somebody else has the row. Times are the
server's, so the clocks of the workers' machines do not matter.

Rows of requests (`contract.interactive`) go the same ways, but end by their reply, with nothing left of them. A bell
tells at once of those that come and go; who misses it finds out at its next heartbeat.

A job's way: queue list, or backlog of the batch whose turn it is -> (LMOVE) intermediate list -> started registry, in
one script, so it is leased the moment it is popped. From there it is finished (mark, job deleted), retried (scheduled
registry), failed (mark, failed registry) or given back (front of its queue). A row whose lease runs out returns to the
front of its queue, and the start that never ended stays counted in the ledger. A row that ran through two crashes is
run alone, so that the third one, if it comes, names the culprit and not its neighbours; after three it is rejected.
While it waits to run alone it is leased but not started, so that the crash of the one that runs is not counted against
those that wait.

Seams of RQ 3.0 that this module stands on (held by tests/worker/test_intake.py): the names of its keys, taken from
`Queue`, `Job`, `Execution`, `ExecutionRegistry` and the registries; the fields `status`, `meta`, `exc_info` (zlib),
`started_at`, `ended_at`, `worker_name` of a job's hash, and `Job.restore` to read it; the members `{job}:{execution}`
of the started registry, scored by expiry, which RQ's clean-up (any `rq info` runs it) puts back on the queue because
the jobs carry `Retry`; scheduled and failed registries scored by due time and expiry; `BaseWorker.register_birth`,
`register_death`, `heartbeat`, `set_state` and `worker_registration.clean_worker_registry`, which make a worker visible.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import socket
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, cast
from uuid import uuid4

from pydantic import ValidationError
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from contract import interactive, logs
from contract.errors import BadPrompt, PromptError, PromptFailure, UsageError
from contract.jobs import RETRIES, SCHEMA, ErrorCode, ErrorDetail, ErrorRow, PromptJob
from contract.ledger import Ledger, Mark
from contract.names import Connection
from contract.queues import FAILURE_TTL_S, fits, queues
from contract.ranges import by_batch
from contract.settings import WorkerSettings
from worker.evidence import Evidence, Vitals
from worker.journal import Journal
from worker.lanes import Lane
from worker.reconciler import Reconciler
from worker.restarts import first_line
from worker.scripts import ANSWER, EMPTY, FAIL, FINISH, GIVE_BACK, RENEW, RETRY, START, TAKE

QUARANTINE = 3
"""Starts that never ended after which a prompt is not started again."""
SUSPECT = QUARANTINE - 1
"""Starts that never ended after which a prompt runs alone; counted when it does, not when it is taken."""
OUR_JOB = re.compile(r"([A-Za-z0-9_-]+)-([0-9]{1,9})", re.ASCII)
"""Batch and row index in a job's id. A batch names folders, so nothing else may pass."""
POLL_S = 0.05
BELL_MS = 5_000
"""The longest wait for the bell in one call."""
LATE = 1_000
"""So many requests that were withdrawn lately are known, for rows that are just being taken."""
AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, NoScriptError)


@dataclass(frozen=True)
class Lease:
    """Our right to a job, by its Redis keys. Private to this module."""

    lane: Lane
    job_id: str
    member: str
    execution_id: str
    execution: str
    executions: str
    order: int


@dataclass(frozen=True)
class Taken:
    """A prompt that this worker holds. `attempt` counts from 1; `suspect` is the number of earlier starts that never
    ended, that is, of worker crashes it ran through; `taken_at` is in seconds since the epoch."""

    job: PromptJob
    attempt: int
    suspect: int
    taken_at: float
    lease: Lease = field(repr=False)

    @property
    def batch(self) -> str:
        return self.job.batch

    @property
    def index(self) -> int:
        return self.job.index

    @property
    def interactive(self) -> bool:
        """Is it a choice of a request?"""
        return self.lease.lane.interactive

    @property
    def reply_to(self) -> str | None:
        return self.job.reply_to


@dataclass(frozen=True)
class Rejected:
    """A job that must not or cannot run. It is held like a taken one until `fail` ends it."""

    batch: str
    index: int
    error: PromptError
    attempts: int
    lease: Lease = field(repr=False)
    payload: dict[str, Any] = field(default_factory=dict, repr=False)
    """What could be read of the job."""

    @property
    def interactive(self) -> bool:
        return self.lease.lane.interactive

    @property
    def reply_to(self) -> str | None:
        given = self.payload.get("reply_to")
        return given if isinstance(given, str) else None

    def error_row(self, worker: str) -> ErrorRow:
        """The row to write before `fail`; line 0 and the index for an id where the job did not tell."""
        code, now = ErrorCode(self.error.code), round(time.time(), 3)
        detail = ErrorDetail(code=code, message=str(self.error), attempts=self.attempts, at=now)
        told = {key: self.payload[key] for key in ("id", "line", "prompt", "metadata") if key in self.payload}
        told.setdefault("prompt", self.payload.get("messages") or self.payload.get("prompt_token_ids"))
        blank = {"index": self.index, "id": str(self.index), "line": 0, "prompt": None}
        try:
            return ErrorRow.model_validate({**blank, **told, "error": detail, "worker": worker})
        except ValidationError:
            return ErrorRow.model_validate({**blank, "error": detail, "worker": worker})


Held = Taken | Rejected


def worker_name(settings: WorkerSettings) -> str:
    """The configured name, else host and process id, in letters that RQ, Redis and file names all take."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", settings.name or f"{socket.gethostname()}-{os.getpid()}")


class Intake:
    """The worker's side of the queues. A context manager: inside, the worker is known to RQ and its leases live.

    `take`, `finish`, `retry`, `fail` and `give_back` are for one thread, the loop's. While the server is away they do
    not raise: nothing is taken, and what ended is kept and recorded when the server is back.

    `vitals` and `predecessor` are for the evidence: how this process stands, and how the one before it ended.
    """

    def __init__(
        self,
        redis: Connection,
        ledger: Ledger,
        settings: WorkerSettings,
        vitals: Vitals = dict,
        predecessor: str | None = None,
    ) -> None:
        self.name = worker_name(settings)
        self._redis = redis
        self._ledger = ledger
        self._settings = settings
        self._log = logs.get(worker=self.name)
        self.reconciler = Reconciler(redis, ledger, settings, self.name)
        self.evidence = Evidence(redis, self.name, utcformat(now()), vitals, QUARANTINE)
        self._predecessor = predecessor
        self._queues = queues(redis, settings.queue_model)
        self._lanes = [Lane.of(queue) for queue in self._queues]
        registered = redis.names.registered(self.name)
        self._worker = BaseWorker(
            self._queues, name=registered, connection=redis, serializer=JSONSerializer, worker_ttl=1
        )
        self._empty_script = redis.register_script(EMPTY)
        scripts = (TAKE, START, RENEW, FINISH, FAIL, RETRY, GIVE_BACK, ANSWER)
        self._take_script, self._start_script, self._renew_script, *endings = map(redis.register_script, scripts)
        self._finish_script, self._fail_script, self._retry_script, self._give_back_script, self._answer_script = (
            endings
        )
        self.journal = Journal(self._log)
        self.tally: Counter[str] = Counter()
        """How many leases were lost and prompts retried, for the metrics."""
        self.beaten_at = time.monotonic()
        """When the heart last beat, so that Redis answered, on the monotonic clock."""
        self._guard = threading.Lock()
        self._held: dict[str, Held] = {}
        self._lost: list[Taken] = []
        self._rejected: list[Rejected] = []
        self._parked: list[Taken] = []
        self._alone: Taken | None = None
        self._postponed: list[tuple[Sequence[Held], _Commands]] = []
        self._orders = 0
        self._bell = threading.Event()
        self._bell_key = interactive.bell(redis.names, settings.queue_model)
        self._heard = "0-0"
        self._withdrawn: deque[str] = deque(maxlen=LATE)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    # Life

    def __enter__(self) -> Intake:
        self._claim_name()
        self.evidence.begin(self._predecessor)
        self._beat()
        self._heard = f"{int(self._ledger.now() * 1000)}-0"
        threading.Thread(target=self._repeat, args=(self._listen, 0.0), name="bell", daemon=True).start()
        for name, action, interval in (
            ("heartbeat", self._beat, self._settings.lease_s / 3),
            ("reconciler", self.reconciler.run, self._settings.scan_s),
        ):
            thread = threading.Thread(target=self._repeat, args=(action, interval), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave in order. What is still held goes back; after an error its start stays counted against it."""
        crashed = isinstance(error, Exception)
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=self._settings.lease_s)
        with contextlib.suppress(RedisError):
            self.evidence.ended(first_line(error)) if error and crashed else self.evidence.left()
        self._flush()
        self._put_back(self._all_held(), started_counts=crashed)
        self.journal.tell(now=True)
        with contextlib.suppress(RedisError):
            self._worker.register_death()

    def _claim_name(self) -> None:
        """Take over a name left by a dead worker of this machine at once, one of another machine when it expires."""
        deadline = time.monotonic() + self._settings.lease_s + 2
        while record := cast("dict[bytes, bytes]", self._redis.hgetall(self._worker.key)):
            if b"death" in record or self._is_dead_neighbour(record):
                self._redis.delete(self._worker.key)
                return
            if time.monotonic() > deadline:
                host, pid = (record.get(key, b"?").decode() for key in (b"hostname", b"pid"))
                raise UsageError(f"a worker named '{self.name}' is running on {host} (process {pid}): choose another")
            time.sleep(POLL_S)

    def _is_dead_neighbour(self, record: dict[bytes, bytes]) -> bool:
        if record.get(b"hostname", b"").decode() != self._worker.hostname:
            return False
        try:
            os.kill(int(record.get(b"pid", b"0")) or os.getpid(), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, ValueError):
            return False
        return False

    def _repeat(self, action: Callable[[], object], interval: float) -> None:
        """Run `action` now and every `interval` seconds until we leave. Whatever happens in it, this goes on."""
        failures = 0
        while True:
            try:
                action()
                failures = 0
            except Exception as error:  # noqa: BLE001 - leases must live on whatever maintenance runs into
                if self._stopping.is_set():
                    return
                failures += 1
                if _is_outage(error):
                    self._log.warning("redis_away", reason=str(error))
                else:
                    self._log.exception("upkeep_failed")
            if self._stopping.wait(min(interval, 0.1 * 2 ** min(failures, 10)) if failures else interval):
                return

    # Taking

    def take(self, room: int, wait_s: float = 0.0, most: int | None = None) -> list[Taken]:
        """Up to `room` prompts of batches, and up to `most` (`room`, unless given) with those of requests, the most
        urgent queue first; waits up to `wait_s` seconds for the first one.

        An idle worker that gets some lingers for more, but not when somebody waits. Look at `rejected()` after every
        call.
        """
        most = room if most is None else most
        idle = not self._running()
        deadline = time.monotonic() + wait_s
        rows = self._take_now(room, most)
        while not rows and not self._rejected and (left := deadline - time.monotonic()) > 0:
            if self._bell.wait(min(POLL_S, left)):
                self._bell.clear()
            rows = self._take_now(room, most)
        lingers = idle and rows and self._alone is None and not any(row.interactive for row in rows)
        if lingers and len(rows) < room and self._settings.linger_ms:
            time.sleep(self._settings.linger_ms / 1000)
            rows += self._take_now(room - len(rows), most - len(rows))
        self.journal.taken((row.batch, row.index) for row in rows)
        return rows

    def rung(self) -> bool:
        """May a request be waiting? For those who have room for nothing else, and would else not look."""
        return self._bell.is_set()

    def is_empty(self) -> bool:
        """Is there nothing left to do for this worker: nothing held, waiting, or scheduled for a retry?

        Batches outside their hours do not count: it may be long until they may run.
        """
        if self._all_held() or self._postponed:
            return False
        try:
            return bool(self._empty_script(keys=[key for lane in self._lanes for key in lane.taking]))
        except RedisError as error:
            if not _is_outage(error):
                raise
            return False

    def rejected(self) -> list[Rejected]:
        """Jobs found by `take` that cannot run, once each: write their `error_row`, then `fail` them."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _take_now(self, room: int, most: int) -> list[Taken]:
        """One look at the queues. A suspect waits, leased, until nothing else runs, and then runs alone."""
        self._flush()
        if self._postponed:
            return []
        if self._alone and self._holds(self._alone):
            return []
        self._alone = None
        self._parked = [row for row in self._parked if self._holds(row)]
        if not self._parked and most > 0:
            rows = self._pop(room, most)
            self._parked = [row for row in rows if row.suspect >= SUSPECT]
            if calm := [row for row in rows if row.suspect < SUSPECT]:
                return calm
        if self._parked and most > 0 and not self._running() and self._start_alone(self._parked[0]):
            self._alone = self._parked.pop(0)
            self._log.warning("prompt_runs_alone", batch=self._alone.batch, index=self._alone.index)
            return [self._alone]
        return []

    def _start_alone(self, row: Taken) -> bool:
        """Count the start of a suspect; False when it is not ours any more, or nothing can be counted now."""
        keys = [row.lease.lane.started, self._ledger.key(row.batch, "starts")]
        try:
            return bool(self._start_script(keys=keys, args=[row.lease.member, row.index]))
        except RedisError as error:
            if not _is_outage(error):
                raise
            return False

    def _pop(self, room: int, most: int) -> list[Taken]:
        self._bell.clear()  # before we look: whoever rings from now on is heard
        keys = [key for lane in self._lanes for key in lane.taking]
        patterns = [
            Job.key_for("%s"),
            Execution("%s", "%s", self._redis).key,
            ExecutionRegistry("%s", self._redis).key,
            *(self._ledger.key("%s", part) for part in (*Mark, "starts")),
            self._ledger.key("%s"),
            self._ledger.key("%s", "backlog"),
        ]
        fixed = [room, most, self._settings.lease_s, self.name, self._worker.executions_key, utcformat(now()), SUSPECT]
        try:
            found = self._take_script(keys=keys, args=[*fixed, *patterns, uuid4().hex])
        except RedisError as error:
            if not _is_outage(error):
                raise
            self._log.warning("redis_away", reason=str(error))
            return []
        self._note_crashes(found)
        rows, over = [], []
        for lane, job_id, execution_id, record, ended, starts in found:
            lease = self._lease(self._lanes[lane - 1], job_id.decode(errors="replace"), execution_id.decode())
            row = self._read(lease, record, starts)
            if ended:
                over.append(row)  # it ended already; a crash came before its job was put away
            else:
                rows.append(row)
        self._hold([*rows, *over])
        if len([row for row in rows if row.interactive]) == most:
            self._bell.set()  # there may be more
        rows = self._still_wanted(rows)
        self._end(over, lambda pipe, row: self._release(pipe, row, self._finish_script))
        for row in rows:
            if isinstance(row, Rejected):
                self._refuse(row)
        return [row for row in rows if isinstance(row, Taken)]

    def _still_wanted(self, rows: list[Held]) -> list[Held]:
        """Without those that were withdrawn before we held them."""
        with self._guard:
            late = [row for row in rows if row.interactive and row.batch in self._withdrawn]
        self._let_go(late)
        self._strike(late)
        return [row for row in rows if row not in late] if late else rows

    def _note_crashes(self, found: Sequence[Sequence[Any]]) -> None:
        """The last start of a row that comes back from a crash was by the worker that its job names still."""
        for _, job_id, _, record, _, starts in found:
            ours = OUR_JOB.fullmatch(job_id.decode(errors="replace"))
            last = dict(zip(record[::2], record[1::2], strict=True)) if record else {}
            if starts > 1 and ours and last.keys() >= {b"worker_name", b"started_at"}:
                worker, at = (last[name].decode(errors="replace") for name in (b"worker_name", b"started_at"))
                self.evidence.note(ours[1], int(ours[2]), starts - 1, worker, at)
                crash = {"crash": starts - 1, "of": worker, "started_at": at}
                self._log.warning("prompt_outlived_worker", batch=ours[1], index=int(ours[2]), **crash)

    def _lease(self, lane: Lane, job_id: str, execution_id: str) -> Lease:
        execution = Execution(execution_id, job_id, self._redis, self.name)
        self._orders += 1
        return Lease(
            lane=lane,
            job_id=job_id,
            member=execution.composite_key,
            execution_id=execution_id,
            execution=execution.key,
            executions=ExecutionRegistry(job_id, self._redis).key,
            order=self._orders,
        )

    def _read(self, lease: Lease, record: list[bytes] | None, starts: int) -> Held:
        """The prompt in a job's hash, or why it is rejected. Nothing that stands in the hash may raise."""
        payload: dict[str, Any] = {}
        attempts = 0
        try:
            job = Job(lease.job_id, connection=self._redis, serializer=JSONSerializer)
            if not starts:
                raise BadPrompt(ErrorCode.BAD_ROW, "keys of its batch are of other types than ours: restore the server")
            if record == []:
                raise BadPrompt(ErrorCode.BAD_ROW, "the job's record was deleted from Redis: submit the prompt again")
            told = dict(zip(record[::2], record[1::2], strict=True)) if record else {}
            if not all(fits(told.get(packed, b"")) for packed in (b"data", b"exc_info")):
                self._redis.hdel(Job.key_for(lease.job_id), "data", "exc_info")  # nobody else may stumble over it
                raise BadPrompt(ErrorCode.BAD_ROW, "the job is damaged (it would unpack to more than memory bears)")
            job.restore(told)
            attempts = max(0, int(job.meta.get("attempts", 0)))
            payload = dict(job.args[0])
            prompt = _validated(payload, lease.job_id)
            if starts > QUARANTINE:
                raise self._crashed(prompt, starts - 1)
            return Taken(prompt, attempts + 1, starts - 1, time.time(), lease)
        except PromptError as error:
            reason = error
        except Exception as error:  # noqa: BLE001 - rq raises what it likes on a hash that is not a job
            reason = BadPrompt(ErrorCode.BAD_ROW, f"the job is damaged ({type(error).__name__}: {error})"[:500])
        ours = OUR_JOB.fullmatch(lease.job_id) if starts else None
        batch, index = (ours[1], int(ours[2])) if ours else ("", 0)
        return Rejected(batch, index, reason, attempts, lease, payload)

    def _crashed(self, prompt: PromptJob, times: int) -> PromptFailure:
        known = self.evidence.of(prompt.batch, prompt.index)
        message = f"a worker crashed while this prompt ran, {times} times"
        return PromptFailure(ErrorCode.WORKER_CRASHED, f"{message}: {known}" if known else message)

    def _refuse(self, row: Rejected) -> None:
        if row.batch:
            self._rejected.append(row)
        else:  # somebody else's job on our queue, or no ledger: no row to write, but RQ's failed jobs show it
            self._log.error("job_refused", job=row.lease.job_id, reason=str(row.error))
            self._end([row], lambda pipe, job: self._register_failure(pipe, job, row.error))

    # Ending

    def finish(
        self,
        taken: Sequence[Taken],
        tokens: Mapping[str, int] = MappingProxyType({}),
        cached: Collection[str] = frozenset(),
    ) -> int:
        """Their outputs are on the disk: mark the rows done and delete their jobs, in one transaction.

        By job id: `tokens` is how many were generated, `cached` those whose answer was given before. Returns how many
        were still ours; the others are somebody else's by now and are dropped.
        """

        def commands(pipe: Pipeline, row: Held) -> None:
            fence = (row.lease.lane.started, row.lease.member)
            job_id = row.lease.job_id
            self._ledger.mark(
                pipe, row.batch, row.index, Mark.DONE, fence, tokens.get(job_id, 0), cached=job_id in cached
            )
            self._forget_crashes(pipe, row)
            self._release(pipe, row, self._finish_script)

        finished = self._end(taken, commands)
        self.journal.finished((row.batch, row.index) for row in finished)
        return len(finished)

    def will_retry(self, taken: Taken, error: PromptError) -> bool:
        """Is there another attempt for this prompt? If not, write its error row and `fail` it."""
        if not isinstance(error, PromptFailure):
            return False
        most = RETRIES.get(ErrorCode(error.code), 0)
        return taken.attempt < self._settings.max_attempts and (most is None or taken.attempt <= most)

    def retry(self, taken: Taken, error: PromptError) -> bool:
        """Schedule another attempt after a random part of an exponentially growing delay. False: no longer ours."""
        longest = min(self._settings.retry_max_s, self._settings.retry_base_s * 2.0 ** (taken.attempt - 1))
        delay = random.uniform(0.0, longest)
        meta = JSONSerializer.dumps({"attempts": taken.attempt, "error": f"{error.code}: {error}"[:500]})
        self.journal.tell(now=True)  # that it was taken comes first
        self._log.warning(
            "prompt_retried",
            batch=taken.batch,
            index=taken.index,
            attempt=taken.attempt,
            in_s=round(delay, 1),
            code=error.code,
            reason=str(error),
        )

        self.tally["retried"] += 1

        def commands(pipe: Pipeline, row: Held) -> None:
            self._forget_crashes(pipe, row)
            self._release(pipe, row, self._retry_script, row.lease.lane.scheduled, delay, JobStatus.SCHEDULED, meta)

        return bool(self._end([taken], commands))

    def fail(self, row: Taken | Rejected, error: PromptError | None = None) -> bool:
        """Its error row is on the disk: mark the row failed and keep its job for `producer retry`.

        `error` may be left out for a rejected job, which has its own. False: the row is no longer ours.
        """
        reason = error or (row.error if isinstance(row, Rejected) else None)
        assert reason is not None

        def commands(pipe: Pipeline, held: Held) -> None:
            lease = held.lease
            self._ledger.mark(pipe, held.batch, held.index, Mark.FAILED, (lease.lane.started, lease.member))
            self._forget_crashes(pipe, held)
            self._register_failure(pipe, held, reason)

        return bool(self._end([row], commands))

    def tell(self, messages: Sequence[tuple[str, Mapping[str, str | int]]]) -> bool:
        """Put entries on services' streams that are still there; False when the server is away: then try again.

        An entry may be there already by then.
        """
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for stream, fields in messages:
                    most = interactive.MOST_REPLIES
                    pipe.xadd(stream, dict(fields), maxlen=most, approximate=True, nomkstream=True)
                pipe.execute()
        except RedisError as error:
            if not _is_outage(error):
                raise
            return False
        return True

    def answer(self, replies: Sequence[tuple[Held, Mapping[str, str | int]]]) -> int:
        """Rows of requests have ended: send their last replies, and delete all there is of them, in one transaction.

        Returns how many were still ours; the others are somebody else's by now, or withdrawn, and get no reply.
        """
        last = {row.lease.execution_id: reply for row, reply in replies}

        def commands(pipe: Pipeline, row: Held) -> None:
            self._forget_crashes(pipe, row)
            words = [word for pair in last[row.lease.execution_id].items() for word in pair]
            told = [interactive.MOST_REPLIES, *words] if row.reply_to else []
            self._release(pipe, row, self._answer_script, row.reply_to or "", *told)

        return len(self._end([row for row, _ in replies], commands))

    def give_back(self, taken: Sequence[Taken]) -> int:
        """Put rows back at the front of their queues in the order they stood there, as if never started."""
        return self._put_back(taken, started_counts=False)

    def _put_back(self, rows: Sequence[Held], started_counts: bool) -> int:
        counted = [row for row in rows if isinstance(row, Taken) and (row.suspect < SUSPECT or row is self._alone)]
        taken_back = set() if started_counts else {row.lease.execution_id for row in counted}

        def commands(pipe: Pipeline, row: Held) -> None:
            uncount = int(row.lease.execution_id in taken_back)
            self._release(pipe, row, self._give_back_script, row.lease.lane.waiting, uncount)

        backwards = sorted(rows, key=lambda row: row.lease.order, reverse=True)  # each is put before the last
        returned = self._end(backwards, commands)
        if any(row.interactive for row in rows):
            with contextlib.suppress(RedisError):
                interactive.ring(self._redis, self._settings.queue_model)
        if returned:
            indices = by_batch((row.batch, row.index) for row in returned)
            self._log.info("rows_given_back", indices=indices, rows=len(returned))
        return len(returned)

    def _forget_crashes(self, pipe: Pipeline, row: Held) -> None:
        if isinstance(row, Rejected) or row.suspect:
            self.evidence.forget(pipe, row.batch, row.index)

    def _register_failure(self, pipe: Pipeline, row: Held, error: PromptError) -> None:
        text = zlib.compress(f"{error.code}: {error}".encode("utf-8", errors="backslashreplace"))
        self._release(pipe, row, self._fail_script, row.lease.lane.failed, FAILURE_TTL_S, utcformat(now()), text)

    def _release(self, pipe: Pipeline, row: Held, script: Any, target: str = "", *args: Any) -> None:
        """Queue on `pipe` one of the scripts that end a lease; its answer is 1, or 0 when the lease was lost."""
        lease, key = row.lease, self._ledger.key
        ledger = [key(row.batch, part) for part in (Mark.DONE, Mark.FAILED, "starts")]
        ours = [lease.lane.started, lease.execution, lease.executions, self._worker.executions_key]
        cancelled = key(row.batch, Mark.CANCELLED)
        keys = [*ours, Job.key_for(lease.job_id), *ledger, target or lease.lane.waiting, cancelled]
        script(keys=keys, args=[lease.member, lease.execution_id, row.index, lease.job_id, *args], client=pipe)

    def _end(self, rows: Sequence[Held], commands: _Commands) -> list[Held]:
        """Run `commands` for all rows in one transaction; returns those whose leases were still ours.

        While the server is away the rows stay leased and the transaction is run later; they count as ours.
        """
        if not rows:
            return []
        self._let_go(rows)  # first, or a heartbeat in between would take an ended lease for a lost one
        try:
            kept = self._transact(rows, commands)
        except RedisError as error:
            if not _is_outage(error):
                raise
            self._log.warning("redis_away", rows=len(rows), reason=str(error))
            self._hold(rows)
            self._postponed.append((rows, commands))
            return list(rows)
        self._tell_lost([row for row, ours in zip(rows, kept, strict=True) if not ours])
        return [row for row, ours in zip(rows, kept, strict=True) if ours]

    def _transact(self, rows: Sequence[Held], commands: _Commands) -> list[bool]:
        with self._redis.pipeline(transaction=True) as pipe:
            last = []
            for row in rows:
                commands(pipe, row)
                last.append(len(pipe) - 1)
            answers = pipe.execute()
        return [answers[place] == 1 for place in last]

    def _flush(self) -> None:
        """Run what could not be run while the server was away; at the first sign that it still is, keep the rest."""
        postponed, self._postponed = self._postponed, []
        for place, (rows, commands) in enumerate(postponed, start=1):
            self._end(rows, commands)
            if self._postponed:
                self._postponed += postponed[place:]
                return

    # Holding

    def held(self) -> list[Taken]:
        """Prompts this worker has a lease on, in the order in which they were taken."""
        return [row for row in self._all_held() if isinstance(row, Taken)]

    def lost(self) -> list[Taken]:
        """Prompts whose lease was found lost since the last call: working on them is of no use any more."""
        with self._guard:
            lost, self._lost = self._lost, []
        return lost

    def _all_held(self) -> list[Held]:
        with self._guard:
            return sorted(self._held.values(), key=lambda row: row.lease.order)

    def _running(self) -> int:
        """Prompts that the caller has at this moment."""
        return len(self.held()) - len(self._parked)

    def _holds(self, row: Held) -> bool:
        with self._guard:
            return row.lease.execution_id in self._held

    def _hold(self, rows: Iterable[Held]) -> None:
        with self._guard:
            self._held.update({row.lease.execution_id: row for row in rows})

    def _let_go(self, rows: Iterable[Held]) -> None:
        with self._guard:
            for row in rows:
                self._held.pop(row.lease.execution_id, None)

    def _beat(self) -> None:
        """Renew the worker's key and every lease, and say how we stand; rows that somebody else has are let go."""
        if not self._redis.exists(self._worker.key):
            self._worker.register_birth()  # it expired while we or the server stood still
        rows = self._all_held()
        with self._redis.pipeline(transaction=False) as pipe:
            self._worker.set_state(WorkerStatus.BUSY if rows else WorkerStatus.IDLE, pipeline=pipe)
            self._worker.heartbeat(timeout=math.ceil(self._settings.lease_s) + 1, pipeline=pipe)
            self.evidence.beat(pipe)
            keys = [key for row in rows for key in (row.lease.lane.started, row.lease.execution, row.lease.executions)]
            members = [word for row in rows for word in (row.lease.member, row.lease.execution_id)]
            self._renew_script(keys=keys, args=[self._settings.lease_s, *members], client=pipe)
            missing = {execution.decode() for execution in pipe.execute()[-1]}
        self.beaten_at = time.monotonic()
        self._note_lost(missing)
        self._bell.set()  # it may have been rung while we could not hear it

    def _note_lost(self, executions: set[str]) -> None:
        self._tell_lost(self._lose(lambda row: row.lease.execution_id in executions))

    def _tell_lost(self, rows: Sequence[Held]) -> None:
        with self._guard:
            self.tally["lost"] += len(rows)
        for row in rows:
            self._log.warning("lease_lost", batch=row.batch, index=row.index)

    def _lose(self, which: Callable[[Held], bool]) -> list[Held]:
        with self._guard:
            gone = [row for row in self._held.values() if which(row)]
            for row in gone:
                del self._held[row.lease.execution_id]
            self._lost += [row for row in gone if isinstance(row, Taken)]
        self._strike(gone)
        return gone

    def _strike(self, rows: Sequence[Held]) -> None:
        """Take rows out of RQ's set of what we execute: whoever ended their leases did not know it."""
        if rows:
            with contextlib.suppress(RedisError):
                self._redis.srem(self._worker.executions_key, *(row.lease.member for row in rows))

    def _listen(self) -> None:
        """Wait for the bell: something was asked, or withdrawn."""
        found = self._redis.xread({self._bell_key: self._heard}, block=BELL_MS)
        for entry, fields in interactive.entries(found):
            self._heard = entry
            if request := fields.get("withdrawn"):
                self._note_withdrawn(request)
            else:
                self._bell.set()

    def _note_withdrawn(self, request: str) -> None:
        with self._guard:
            self._withdrawn.append(request)  # first: a row that is held later is looked up here
        if gone := self._lose(lambda row: row.interactive and row.batch == request):
            self._log.info("request_withdrawn", batch=request, rows=len(gone))


_Commands = Callable[[Pipeline, Held], None]


def _is_outage(error: Exception) -> bool:
    """The server is away or takes no writes for now (its disk is full, say): what was asked is asked again later."""
    return isinstance(error, AWAY) or (isinstance(error, ResponseError) and "MISCONF" in str(error))


def _validated(payload: dict[str, Any], job_id: str) -> PromptJob:
    version = payload.get("schema_version", SCHEMA)
    if isinstance(version, int) and version > SCHEMA:
        raise BadPrompt(
            ErrorCode.BAD_ROW,
            f"the job's schema is {version} and this worker knows {SCHEMA}: upgrade it, then `producer retry`",
        )
    try:
        prompt = PromptJob.model_validate(payload)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            what = f"the job has a field that this worker does not know ({where[:100]}), so its producer is newer"
            raise BadPrompt(ErrorCode.BAD_ROW, f"{what}: upgrade the worker, then `producer retry`") from None
        raise BadPrompt(ErrorCode.BAD_ROW, f"the job is damaged ({where}: {first['msg']})") from None
    if prompt.job_id != job_id:
        raise BadPrompt(ErrorCode.BAD_ROW, f"the job is damaged (it says that it is {prompt.job_id})")
    return prompt
