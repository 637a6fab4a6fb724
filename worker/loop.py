"""The worker's loop: take prompts while the engine has room, step, settle what ended.

Rows enter and leave between any two denoise steps. Every prompt taken ends in exactly one of: an output row, an
error row, a retry, or being given back. Nothing is settled with the queue before its row is safe: on the disk, or, if
it answers a request, in the same step. Requests are taken also when there is room for nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from contract.errors import PromptError, PromptFailure
from contract.jobs import Completion, ErrorCode, ErrorDetail, ErrorRow, Usage, shown
from worker.answers import Answers, Kept
from worker.engine import Finished
from worker.intake import Intake, Rejected, Taken
from worker.model import Model, applied_params
from worker.outputs import Outputs
from worker.progress import Phase, Progress
from worker.replies import Replies
from worker.restarts import poisons
from worker.sinks import Ended, Files, Sink
from worker.throughput import MicroBatch
from worker.transcript import Answer, Transcript, answer
from worker.uploads import Uploads

IDLE_WAIT_S = 0.5
DISK_WAIT_S = 0.5
FLUSH_WAIT_S = 0.1


@dataclass(frozen=True)
class Running:
    """A prompt in the engine; `since` and `deadline` are on the monotonic clock, in seconds.

    `transcript` is kept where somebody reads along, or a stop text may end the answer.
    """

    taken: Taken
    micro_batch: MicroBatch
    sink: Sink
    since: float
    deadline: float
    transcript: Transcript | None
    key: str | None = None
    """Under which its answer is kept."""


@dataclass
class Loop:
    """One worker at work. `run` returns when it was asked to stop, or, with `burst`, when no work is left."""

    intake: Intake
    model: Model
    outputs: Outputs | Uploads
    grace_s: float
    log: structlog.stdlib.BoundLogger
    log_prompts: bool = False
    progress: Progress = field(default_factory=Progress)
    answers: Answers = field(default_factory=Answers)
    running: dict[str, Running] = field(default_factory=dict)
    apart: deque[list[Taken]] = field(default_factory=deque)
    """Groups of a failed step, each to run without the others until the culprit is alone."""
    unwritten: list[Ended] = field(default_factory=list)
    files: Files = field(init=False)
    replies: Replies = field(init=False)
    _stop: threading.Event = field(default_factory=threading.Event)
    _stop_now: threading.Event = field(default_factory=threading.Event)
    _micro_batch: MicroBatch | None = None
    _micro_batches: int = 0

    def __post_init__(self) -> None:
        self.files = Files(self.outputs, self.intake)
        self.replies = Replies(self.intake)

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
        return not (self.running or self.apart or self.unwritten or self.outputs.pending)

    # One turn

    def take(self) -> None:
        """Fill the engine's room. A disk or store that takes no rows ends the taking of batches until it does again."""
        self._drop_lost()
        if self.unwritten or self.outputs.full:
            self._take_urgent()
            if not self.running:
                self._stop.wait(DISK_WAIT_S)
        elif self.apart:
            if not self.running:
                self._admit(self.apart.popleft())
        elif room := self.model.engine.room():
            self._take(room, IDLE_WAIT_S)
        else:
            self._take_urgent()
        self._make_way()

    def _take_urgent(self) -> None:
        """There is no room for batches. Looks at the queue only when somebody rang."""
        if self.intake.rung():
            self._take(0)

    def _take(self, room: int, idle_s: float = 0.0) -> None:
        most = self.model.engine.room(urgent=True)
        self._admit(self.intake.take(room, 0.0 if self.running else idle_s, most))
        for rejected in self.intake.rejected():
            self._give_up(rejected, rejected.error, rejected.error_row(self.intake.name))

    def _make_way(self) -> None:
        """Where memory has no room for a request, the youngest rows of batches go back, as if never started."""
        while (job_id := self.model.engine.in_the_way()) is not None:
            running = self._drop(str(job_id))
            self.log.info("row_gives_way", batch=running.taken.batch, index=running.taken.index)
            self.intake.give_back([running.taken])

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
        self._read_along()
        self._end_overdue()

    def settle(self) -> None:
        """Deliver the rows that ended and end their jobs, each to its sink; those that cannot be delivered wait."""
        self.replies.flush()
        if not (self.unwritten or self.outputs.pending):
            return
        ended, self.unwritten = self.unwritten, []
        self.progress.turn(Phase.STOPPING if self._stop.is_set() else Phase.PUBLISHING)
        for sink in dict.fromkeys([self.files, *(one.sink for one in ended)]):
            rows = [one for one in ended if one.sink is sink]
            try:
                settled = sink.settle(rows)
            except OSError as error:
                self.log.error("disk_full", reason=str(error))
                self.unwritten += rows
            else:
                self.progress.finished += settled.rows
                self.progress.tokens += settled.tokens
        self.progress.disk_full = bool(self.unwritten)

    def wind_down(self) -> None:
        """Finish what the grace time allows, give back the rest."""
        deadline = time.monotonic() + self.grace_s
        self.progress.turn(Phase.STOPPING)
        while self.running and time.monotonic() < deadline and not self._stop_now.is_set():
            self.step()
            self.settle()
        self.settle()
        self._flush(deadline)
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
            try:
                request = self.model.request(job.job_id, job.asked, job.params, taken.interactive)
                key = None if taken.interactive else self.answers.key(request.prompt_ids, job.params)
                if kept := self.answers.find(key):
                    self._ended(taken, self._as_before(taken, kept, request.params.seed), self._sink(taken))
                    continue
                self.model.engine.add(request)
            except PromptError as error:
                self._fail(self._begun(taken), error)
            except Exception as error:
                if poisons(error):
                    raise
                self.log.error("prompt_not_admitted", batch=taken.batch, index=taken.index, exc_info=error)
                self._fail(self._begun(taken), PromptFailure(ErrorCode.MODEL_ERROR, f"{type(error).__name__}: {error}"))
            else:
                self.running[job.job_id] = running = self._begun(taken, key)
                running.sink.started(taken)

    def _begun(self, taken: Taken, key: str | None = None) -> Running:
        params, now = taken.job.params, time.monotonic()
        micro_batch = self._open_micro_batch()
        micro_batch.admit(_queued_s(taken))
        transcript = Transcript(self.model.tokenizer, params.stop) if taken.job.stream or params.stop else None
        deadline = now + (params.timeout_s or math.inf)
        return Running(taken, micro_batch, self._sink(taken), now, deadline, transcript, key)

    def _sink(self, taken: Taken | Rejected) -> Sink:
        return self.replies if taken.interactive else self.files

    def _read_along(self) -> None:
        """Rows with a transcript: what is final of them by now is told, and a stop text ends them."""
        for job_id, running in [item for item in self.running.items() if item[1].transcript]:
            transcript = running.transcript
            assert transcript is not None
            if not (more := self.model.engine.progress(job_id, len(transcript.token_ids))):
                continue
            transcript.take(more)
            if transcript.stopped and (found := self._answer(running.taken, transcript.token_ids)).stopped:
                self._finish(self.model.engine.cut(job_id, found.tokens), found)
            else:
                running.sink.progressed(running.taken, transcript, time.monotonic() - running.since)

    def _answer(self, taken: Taken, token_ids: Sequence[int]) -> Answer:
        return answer(self.model.tokenizer, token_ids, taken.job.params.stop)

    def _finish(self, result: Finished, found: Answer | None = None) -> None:
        """`found` is the answer of a row that a stop text ended; any other one's is looked for here."""
        running = self.running.pop(str(result.id))
        if result.error:
            self._fail(running, result.error)
            return
        if found is None:
            found = self._answer(running.taken, result.token_ids)
            if found.stopped:
                result = replace(result, token_ids=result.token_ids[: found.tokens], finish_reason="stop")
        row = self._completion(running.taken, result, found.text)
        self._ended(running.taken, row, running.sink)
        self.progress.prompt_tokens += result.prompt_tokens
        self.progress.forwards += result.forwards
        self.answers.keep(running.key, row)
        self._record(running.micro_batch, result)

    def _ended(self, taken: Taken, row: Completion, sink: Sink) -> None:
        self.unwritten.append(Ended(taken, row, sink))
        if self.log_prompts:
            self.log.info("prompt_answered", batch=taken.batch, index=row.index, prompt=row.prompt, output=row.output)

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
            detail = ErrorDetail(
                code=ErrorCode(error.code), message=str(error), attempts=taken.attempt, at=round(time.time(), 3)
            )
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
        self.unwritten.append(Ended(taken, row, self._sink(taken), error))

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
        self._flush(time.monotonic() + self.grace_s)
        on_their_way = [ended.taken for *_, ended in self.outputs.left()]
        self.intake.give_back(on_their_way + [row for group in self.apart for row in group])
        self.apart.clear()

    def _flush(self, deadline: float) -> None:
        """Wait for what the store has not taken and published yet."""
        while self.outputs.pending and time.monotonic() < deadline and not self._stop_now.is_set():
            self.outputs.wait(FLUSH_WAIT_S)
            self.settle()

    def _drop_lost(self) -> None:
        """Rows that somebody else has by now would only be dropped at the end."""
        for taken in self.intake.lost():
            if taken.job.job_id in self.running:
                self._drop(taken.job.job_id)

    def _drop(self, job_id: str) -> Running:
        """Take a row out that does not end here."""
        running = self.running.pop(job_id)
        self.model.engine.remove(job_id)
        self._record(running.micro_batch, None)
        return running

    def _completion(self, taken: Taken, result: Finished, text: str) -> Completion:
        job = taken.job
        return Completion(
            index=job.index,
            id=job.id,
            prompt=shown(job.asked),
            output=text,
            finish_reason=result.finish_reason,
            notes=list(result.plan.notes),
            usage=Usage(prompt_tokens=result.prompt_tokens, completion_tokens=len(result.token_ids)),
            model=self.model.name,
            params=applied_params(result) | _told(taken),
            timing={
                "queued_s": round(_queued_s(taken), 3),
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

    def _as_before(self, taken: Taken, kept: Kept, seed: int | None) -> Completion:
        """The row of an answer that was given before: nothing was denoised for it."""
        job = taken.job
        return Completion(
            index=job.index,
            id=job.id,
            prompt=shown(job.asked),
            output=kept.output,
            finish_reason=kept.finish_reason,
            notes=kept.notes,
            usage=kept.usage,
            model=self.model.name,
            params=kept.params | {"seed": seed} | _told(taken),
            timing={"queued_s": round(_queued_s(taken), 3), "denoise_s": 0.0},
            denoise={"steps": 0, "forwards": 0, "tokens_per_forward": 0.0},
            worker=self.intake.name,
            cached=True,
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


def _queued_s(taken: Taken) -> float:
    return max(0.0, taken.taken_at - taken.job.submitted_at)


def _told(taken: Taken) -> dict[str, Any]:
    """What the row was told and the engine was not."""
    return taken.job.params.model_dump(include={"stop", "timeout_s"}, exclude_defaults=True)
