"""How far the loop is. Written by the loop's thread alone, read by those that look after it; plain values, no lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Progress:
    """Steps begun with rows in the engine, how many rows the last one had, whether it runs still; rows finished, and
    their tokens."""

    steps: int = 0
    rows: int = 0
    stepping: bool = False
    finished: int = 0
    tokens: int = 0

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
