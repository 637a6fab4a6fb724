"""How far the loop is. Written by the loop's thread alone, read by those that look after it; plain values, no lock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from worker.steptimes import StepTimes


class Phase(StrEnum):
    """What a worker's process is at."""

    LOADING = "loading"
    WORKING = "working"
    PUBLISHING = "publishing"
    STOPPING = "stopping"


@dataclass
class Progress:
    """Steps begun with rows in the engine, how many rows the last one had, whether it runs still; rows finished, and
    their tokens; rows that failed, by code. `turned_at` is when the loop last began a turn, on the monotonic clock."""

    steps: int = 0
    rows: int = 0
    stepping: bool = False
    finished: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    forwards: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    times: StepTimes = field(default_factory=StepTimes)
    phase: Phase = Phase.LOADING
    turned_at: float = field(default_factory=time.monotonic)
    disk_full: bool = False

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Around one step of the engine."""
        self.steps += bool(rows)
        self.rows = rows
        self.stepping = True
        try:
            yield
        finally:
            self.stepping = False

    def turn(self, phase: Phase) -> None:
        """The loop goes on, and is at `phase` now."""
        self.phase = phase
        self.turned_at = time.monotonic()
