"""Pushing requests through an engine, and what a pass over them came to."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from worker.engine import Engine, EngineStats, Finished, Request


@dataclass(frozen=True)
class Pass:
    """One pass of a system over its prompts."""

    seconds: float
    tokens: int  # of the answers, up to their stop token and without it
    finished: dict[Hashable, Finished] = field(default_factory=dict)
    stats: EngineStats | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def forwards(self) -> int:
        """Denoise and commit forwards, summed over rows."""
        return sum(one.forwards for one in self.finished.values())


def continuous(engine: Engine, requests: Iterable[Request]) -> Pass:
    """A waiting prompt enters as soon as a row is free, between any two steps."""
    waiting = list(reversed(list(requests)))
    finished: dict[Hashable, Finished] = {}
    wanted = len(waiting)
    started, before = time.perf_counter(), engine.stats
    while len(finished) < wanted:
        while waiting and engine.room():
            engine.add(waiting.pop())
        _take(engine, finished)
    return _passed(engine, finished, started, before)


def barrier(engine: Engine, requests: Sequence[Request]) -> Pass:
    """As many prompts as there are rows enter together; the next enter when all of them have ended."""
    finished: dict[Hashable, Finished] = {}
    started, before = time.perf_counter(), engine.stats
    for first in range(0, len(requests), engine.max_rows):
        batch = requests[first : first + engine.max_rows]
        for request in batch:
            engine.add(request)
        while len(finished) < first + len(batch):
            _take(engine, finished)
    return _passed(engine, finished, started, before)


def _take(engine: Engine, finished: dict[Hashable, Finished]) -> None:
    for one in engine.step():
        if one.error is not None:
            raise one.error
        finished[one.id] = one


def _passed(engine: Engine, finished: dict[Hashable, Finished], started: float, before: EngineStats) -> Pass:
    seconds = time.perf_counter() - started
    tokens = sum(len(one.token_ids) for one in finished.values())
    return Pass(seconds, tokens, finished, engine.stats - before)
