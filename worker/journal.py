"""What the log says of prompts that go their usual way: which were taken and which were finished, once a second.

A line for each would be most of what a worker writes; a second's rows are a few ranges of numbers. For one thread, the
loop's. What a killed process had not told yet, at most a second of it, the crash evidence and the output rows tell.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog

from contract.ranges import by_batch

EVERY_S = 1.0

Rows = Iterable[tuple[str, int]]


class Journal:
    """Rows as (batch, index) that were not told yet."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._taken: list[tuple[str, int]] = []
        self._finished: list[tuple[str, int]] = []
        self._told = float("-inf")

    def taken(self, rows: Rows) -> None:
        self._taken += rows

    def finished(self, rows: Rows) -> None:
        self._finished += rows

    def tell(self, now: bool = False) -> None:
        """Log what has gathered, if a second has passed since the last time, or `now`."""
        if not (self._taken or self._finished) or (time.monotonic() - self._told < EVERY_S and not now):
            return
        taken, finished, self._taken, self._finished = self._taken, self._finished, [], []
        self._told = time.monotonic()
        if taken:
            self._log.info("rows_taken", indices=by_batch(taken), rows=len(taken))
        if finished:
            self._log.info("rows_finished", indices=by_batch(finished), rows=len(finished))
