"""The worker's loop: take prompts while the engine has room, step, settle what ended.

Rows enter and leave between any two denoise steps. Every prompt taken ends in exactly one of: an output row, an
error row, a retry, or being given back. Nothing is settled with the queue before its row is safe on disk.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from contract.errors import PromptError, PromptFailure
from contract.jobs import Completion, ErrorCode, ErrorDetail, ErrorRow, Row, Usage, shown
from worker.engine import Finished
from worker.intake import Intake, Rejected, Taken
from worker.model import Model, applied_params
from worker.outputs import Outputs
from worker.progress import Phase, Progress
from worker.restarts import poisons
from worker.throughput import MicroBatch

IDLE_WAIT_S = 0.5
DISK_WAIT_S = 0.5


@dataclass(frozen=True)
class Running:
    """A prompt in the engine; `deadline` is on the monotonic clock, in seconds."""

    taken: Taken
    micro_batch: MicroBatch
    deadline: float


@dataclass(frozen=True)
class Ended:
    """A prompt whose row is known but not on the disk yet; `error` for those that have no answer."""

    taken: Taken | Rejected
    row: Row
    error: PromptError | None = None


@dataclass
class Loop:
    """One worker at work. `run` returns when it was asked to stop, or, with `burst`, when no work is left."""

    intake: Intake
    model: Model
    outputs: Outputs
    grace_s: float
    log: structlog.stdlib.BoundLogger
    log_prompts: bool = False
    progress: Progress = field(default_factory=Progress)
    running: dict[str, Running] = field(default_factory=dict)
    apart: deque[list[Taken]] = field(default_factory=deque)
    """Groups of a failed step, each to run without the others until the culprit is alone."""
    unwritten: list[Ended] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _stop_now: threading.Event = field(default_factory=threading.Event)
    _micro_batch: MicroBatch | None = None
    _micro_batches: int = 0

    def run(self, burst: bool = False) -> None:
        """Work until stopped; whatever has not ended by then is given back to the front of its queue."""
        while not self._stop.is_set():
            self.progress.turn(Phase.WORKING)
            self.take()
            self.step()
            self.settle()
            self.intake.journal.tell()
            if burst and self.idle() and self.intake.is_empty():
                break
        self.wind_down()

    def stop(self) -> None:
        """Ask for the end: the first call leaves `grace_s` to finish in, the second gives everything back at once."""
        (self._stop_now if self._stop.is_set() else self._stop).set()

    def idle(self) -> bool:
        """Is nothing here that has not ended and been settled?"""
        return not (self.running or self.apart or self.unwritten)

    # One turn

    def take(self) -> None:
        """Fill the engine's room. A disk that takes no rows ends the taking, until it does again."""
        self._drop_lost()
        if self.unwritten:
            if not self.running:
                self._stop.wait(DISK_WAIT_S)
        elif self.apart:
            if not self.running:
                self._admit(self.apart.popleft())
        elif room := self.model.engine.room():
            self._admit(self.intake.take(room, wait_s=0.0 if self.running else IDLE_WAIT_S))
            for rejected in self.intake.rejected():
                self._give_up(rejected, rejected.error, rejected.error_row(self.intake.name))

    def step(self) -> None:
        """One denoise step of all rows; then those that did not end in time leave."""
        ceiling = self.model.engine.max_rows
        try:
            with self.progress.step(len(self.running)):
                finished = self.model.engine.step()
            self.progress.times.observe(self.model.engine.stats)
        except Exception as error:  # whatever a step runs into, the other rows go on: here, or in a new process
            if poisons(error):
                self._spare()
                raise
            self._part(error)
            return
        if self.model.engine.max_rows < ceiling:
            self.log.warning("out_of_memory", max_rows=self.model.engine.max_rows, before=ceiling)
        for result in finished:
            self._finish(result)
        self._end_overdue()

    def settle(self) -> None:
        """Write the rows that ended, end their jobs, publish the batches that are complete."""
        if not self.unwritten:
            return
        try:
            self.outputs.write([(ended.taken.batch, ended.row) for ended in self.unwritten])
        except OSError as error:
            self.log.error("disk_full", reason=str(error))
            self.progress.disk_full = True
            return
        self.progress.disk_full = False
        settled, self.unwritten = self.unwritten, []
        answered = [ended.taken for ended in settled if isinstance(ended.taken, Taken) and not ended.error]
        tokens = dict(_tokens(settled))
        self.progress.finished += self.intake.finish(answered, tokens)
        self.progress.tokens += sum(tokens.values())
        for ended in settled:
            if ended.error:
                self.intake.fail(ended.taken, ended.error)
        self.progress.turn(Phase.STOPPING if self._stop.is_set() else Phase.PUBLISHING)
        self.outputs.sealed_if_complete(ended.taken.batch for ended in settled)

    def wind_down(self) -> None:
        """Finish what the grace time allows, give back the rest."""
        deadline = time.monotonic() + self.grace_s
        self.progress.turn(Phase.STOPPING)
        while self.running and time.monotonic() < deadline and not self._stop_now.is_set():
            self.step()
            self.settle()
        self.settle()
        left = [running.taken for running in self.running.values()] + [row for group in self.apart for row in group]
        for job_id in self.running:
            self.model.engine.remove(job_id)
        self.running.clear()
        self.apart.clear()
        self.intake.give_back(left)

    # Rows

    def _admit(self, rows: Sequence[Taken]) -> None:
        for taken in rows:
            job = taken.job
            micro_batch = self._open_micro_batch()
            micro_batch.admit(max(0.0, taken.taken_at - job.submitted_at))
            deadline = time.monotonic() + (job.params.timeout_s or math.inf)
            self.running[job.job_id] = Running(taken, micro_batch, deadline)
            try:
                self.model.engine.add(self.model.request(job.job_id, job.asked, job.params))
            except PromptError as error:
                self._fail(self.running.pop(job.job_id), error)

    def _finish(self, result: Finished) -> None:
        running = self.running.pop(str(result.id))
        if result.error:
            self._fail(running, result.error)
            return
        row = self._completion(running.taken, result)
        self.progress.prompt_tokens += result.prompt_tokens
        self.progress.forwards += result.forwards
        self.unwritten.append(Ended(running.taken, row))
        if self.log_prompts:
            self.log.info(
                "prompt_answered", batch=running.taken.batch, index=row.index, prompt=row.prompt, output=row.output
            )
        self._record(running.micro_batch, result)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for job_id, running in [item for item in self.running.items() if item[1].deadline <= now]:
            self.model.engine.remove(job_id)
            message = f"not answered within timeout_s = {running.taken.job.params.timeout_s:g}"
            self._fail(self.running.pop(job_id), PromptFailure(ErrorCode.DEADLINE_EXCEEDED, message))

    def _fail(self, running: Running, error: PromptError) -> None:
        """Another attempt if the error and the attempts so far allow it, else an error row."""
        taken = running.taken
        if self.intake.will_retry(taken, error):
            self.intake.retry(taken, error)
        else:
            detail = ErrorDetail(code=ErrorCode(error.code), message=str(error), attempts=taken.attempt)
            job = taken.job
            row = ErrorRow(
                index=job.index,
                id=job.id,
                line=job.line,
                prompt=shown(job.asked),
                error=detail,
                worker=self.intake.name,
                metadata=job.metadata,
            )
            self._give_up(taken, error, row)
        self._record(running.micro_batch, None)

    def _give_up(self, taken: Taken | Rejected, error: PromptError, row: ErrorRow) -> None:
        self.intake.journal.tell(now=True)  # that it was taken comes first
        self.log.error(
            "prompt_failed",
            batch=taken.batch,
            index=taken.index,
            code=row.error.code,
            attempt=row.error.attempts,
            reason=str(error),
        )
        self.progress.failures[row.error.code] += 1
        self.unwritten.append(Ended(taken, row, error))

    def _part(self, error: Exception) -> None:
        """A step failed and may have one culprit among its rows: run each half without the other until it is alone.

        Only the culprit is charged an attempt. Rows begin anew; their seeds make them end as they would have.
        """
        self.log.error("step_failed", rows=len(self.running), exc_info=error)
        rows = list(self.running.values())
        for running in rows:
            self.model.engine.remove(running.taken.job.job_id)
        self.running.clear()
        if len(rows) == 1:
            self._fail(rows[0], PromptFailure(ErrorCode.MODEL_ERROR, f"{type(error).__name__}: {error}"))
            return
        for running in rows:
            self._record(running.micro_batch, None)
        half = len(rows) // 2
        self.apart.extendleft([[running.taken for running in part] for part in (rows[half:], rows[:half])])

    def _spare(self) -> None:
        """This process has lost its device. Rows that ended, or were not in the step, must not be charged with it."""
        self.settle()
        self.intake.give_back([row for group in self.apart for row in group])
        self.apart.clear()

    def _drop_lost(self) -> None:
        """Rows that somebody else has by now would only be dropped at the end."""
        for taken in self.intake.lost():
            running = self.running.pop(taken.job.job_id, None)
            if running is not None:
                self.model.engine.remove(taken.job.job_id)
                self._record(running.micro_batch, None)

    def _completion(self, taken: Taken, result: Finished) -> Completion:
        job = taken.job
        return Completion(
            index=job.index,
            id=job.id,
            prompt=shown(job.asked),
            output=self.model.tokenizer.decode(result.token_ids),
            finish_reason=result.finish_reason,
            notes=list(result.plan.notes),
            usage=Usage(prompt_tokens=result.prompt_tokens, completion_tokens=len(result.token_ids)),
            model=self.model.name,
            params=applied_params(result) | job.params.model_dump(include={"timeout_s"}, exclude_none=True),
            timing={
                "queued_s": round(max(0.0, taken.taken_at - job.submitted_at), 3),
                "denoise_s": round(result.seconds, 3),
            },
            denoise={
                "steps": result.steps,
                "forwards": result.forwards,
                "tokens_per_forward": round(result.tokens_per_forward, 3),
            },
            worker=self.intake.name,
            metadata=job.metadata,
        )

    # Throughput

    def _open_micro_batch(self) -> MicroBatch:
        """The micro-batch that takes the next prompt: as many as the engine holds, in order of admission."""
        if self._micro_batch is None or self._micro_batch.admitted >= self.model.engine.max_rows:
            self._micro_batches += 1
            self._micro_batch = MicroBatch(self._micro_batches, self.model.engine.stats)
        return self._micro_batch

    def _record(self, micro_batch: MicroBatch, result: Finished | None) -> None:
        """Count a row that left; one `batch_throughput` record when it was its micro-batch's last."""
        micro_batch.count(result)
        if micro_batch.open_rows:
            return
        if micro_batch is self._micro_batch:
            self._micro_batch = None
        record = micro_batch.record(self.model.engine.stats)
        self.log.info("batch_throughput", **record, peak_memory_mb=self.model.peak_memory_mb(), **self.model.place())


def _tokens(settled: Sequence[Ended]) -> Iterator[tuple[str, int]]:
    """The job ids of answered prompts, and how many tokens their answers have."""
    for ended in settled:
        if isinstance(ended.row, Completion) and isinstance(ended.taken, Taken):
            yield ended.taken.job.job_id, ended.row.usage.completion_tokens
