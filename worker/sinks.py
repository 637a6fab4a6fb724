"""Where a prompt's row goes when it has ended: chosen at its admission, the same for all that follows.

Rows of batches go to files (`outputs.py`), those of requests to whoever waits for them (`replies.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from contract.errors import PromptError
from contract.jobs import Completion, Row
from worker.intake import Intake, Rejected, Taken
from worker.outputs import Outputs
from worker.transcript import Transcript
from worker.uploads import Uploads


@dataclass(frozen=True)
class Ended:
    """A prompt whose row is known but not delivered yet; `error` for those that have no answer."""

    taken: Taken | Rejected
    row: Row
    sink: Sink
    error: PromptError | None = None

    @property
    def tokens(self) -> int:
        """Those that were generated for it."""
        return self.row.usage.completion_tokens if isinstance(self.row, Completion) and not self.cached else 0

    @property
    def cached(self) -> bool:
        """Is its answer one that was given before?"""
        return isinstance(self.row, Completion) and self.row.cached


class Settled(NamedTuple):
    """How many rows with an answer were still ours, and the tokens of all answers."""

    rows: int
    tokens: int


class Sink(Protocol):
    """One way out of the worker."""

    def started(self, taken: Taken) -> None:
        """The row enters the engine."""

    def progressed(self, taken: Taken, transcript: Transcript, seconds: float) -> None:
        """More of its answer is final, after `seconds` in the engine."""

    def settle(self, ended: Sequence[Ended]) -> Settled:
        """Deliver the rows and end the jobs of those that are delivered by now; tells of these.

        Raises OSError: then nothing of them is lost, and all are to be settled again later.
        """


class Files:
    """The rows of batches: on the disk, or in the store, before their jobs end; then complete batches are published."""

    def __init__(self, outputs: Outputs | Uploads, intake: Intake) -> None:
        self._outputs = outputs
        self._intake = intake

    def started(self, taken: Taken) -> None:
        """Nobody looks."""

    def progressed(self, taken: Taken, transcript: Transcript, seconds: float) -> None:
        """Nobody looks."""

    def settle(self, ended: Sequence[Ended]) -> Settled:
        durable = [one for *_, one in self._outputs.write([(one.taken.batch, one.row, one) for one in ended])]
        answered = [(one, one.taken) for one in durable if isinstance(one.taken, Taken) and not one.error]
        tokens = {taken.job.job_id: one.tokens for one, taken in answered}
        cached = {taken.job.job_id for one, taken in answered if one.cached}
        finished = self._intake.finish([taken for _, taken in answered], tokens, cached)
        for one in durable:
            if one.error:
                self._intake.fail(one.taken, one.error)
        self._outputs.sealed_if_complete(one.taken.batch for one in durable)
        return Settled(finished, sum(tokens.values()))
