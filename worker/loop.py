"""The worker's loop: take prompts while the engine has room, step, settle what ended.

Rows enter and leave between any two denoise steps. Every prompt taken ends in exactly one of: an output row, an
error row, a retry, or being given back. Nothing is settled with the queue before its row is safe on disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from redis.exceptions import RedisError

from contract.errors import PromptError, PromptFailure
from contract.jobs import Completion, ErrorDetail, ErrorRow, Row, Usage
from worker.engine import Finished
from worker.intake import Intake, Rejected, Taken
from worker.model import Model, applied_params
from worker.outputs import Outputs
from worker.throughput import MicroBatch

IDLE_WAIT_S = 0.5
TROUBLE_WAIT_S = 0.2


@dataclass
class Running:
    """A prompt in the engine."""

    taken: Taken
    micro_batch: MicroBatch


@dataclass(frozen=True)
class Ended:
    """A prompt whose outcome is known but not yet settled with the queue."""

    taken: Taken | Rejected
    row: Row
    error: PromptError | None


@dataclass
class Loop:
    """One worker at work. `run` returns when it was asked to stop, or, with `burst`, when no work is left."""

    intake: Intake
    model: Model
    outputs: Outputs
    worker: str
    max_attempts: int
    grace_s: float
    log: structlog.stdlib.BoundLogger
    log_prompts: bool = False
    running: dict[str, Running] = field(default_factory=dict)
    unwritten: list[Ended] = field(default_factory=list)
    unsettled: list[Ended] = field(default_factory=list)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    stop_now: threading.Event = field(default_factory=threading.Event)
    _micro_batches: int = 0

    def run(self, burst: bool = False) -> None:
        """Work until stopped; whatever has not ended by then is given back to the front of its queue."""
        while not self.stop_requested.is_set():
            self.take()
            self.step()
            self.settle()
            if burst and self.idle() and self.intake.is_empty():
                break
        self.wind_down()

    def idle(self) -> bool:
        """Nothing is running and nothing waits to be settled."""
        return not (self.running or self.unwritten or self.unsettled)
