"""What is measured: the engine, and the same engine used as others use theirs. Each runs one pass a round.

A pass gets a fresh engine, so that nothing kept from the pass before (slots, shared prefixes) helps it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from contract.sampling import SamplingParams
from worker.bench.driving import Pass, barrier, continuous
from worker.bench.prompts import spread
from worker.engine import Engine, Finished, Loaded, Request

WARM_UP_TOKENS = 8
LEAST_PROMPTS = 2
"""Prompts of a baseline with one row, however small the budget."""


@dataclass(frozen=True)
class Workload:
    """What all systems of a run share."""

    loaded: Loaded
    requests: tuple[Request, ...]
    rows: int
    max_step_tokens: int
    budget_s: float  # what a pass of a slow baseline may take, by running on fewer prompts
    base: Path  # checkpoint folder of the autoregressive model that this one was made from
    answers: dict[Hashable, Finished] = field(default_factory=dict)
    """The engine's own answers of the latest round."""

    def engine(self, rows: int | None = None, exact_timing: bool = False) -> Engine:
        return engine_of(self.loaded, rows or self.rows, self.max_step_tokens, exact_timing)


def engine_of(loaded: Loaded, rows: int, max_step_tokens: int, exact_timing: bool = False) -> Engine:
    return Engine(loaded.spec, loaded.decoder, rows, max_step_tokens, exact_timing=exact_timing)


class System(Protocol):
    """One way to answer the prompts."""

    name: ClassVar[str]

    def prepare(self) -> None:
        """Load and warm up; not counted. Raises UsageError when something is missing, saying what to do."""

    def run(self) -> Pass:
        """One counted pass."""

    def conditions(self) -> dict[str, Any]:
        """How this system was run, for the report."""


class Continuous:
    """The engine under test."""

    name: ClassVar[str] = "engine"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def prepare(self) -> None:
        continuous(self._workload.engine(), shortened(self._workload.requests[: self._workload.rows]))

    def run(self) -> Pass:
        done = continuous(self._workload.engine(), self._workload.requests)
        self._workload.answers.update(done.finished)
        return done

    def conditions(self) -> dict[str, Any]:
        return {"prompts": len(self._workload.requests), "rows": self._workload.rows, "admission": "at every step"}


class Static:
    """The same engine with a barrier: a micro-batch ends before the next one starts."""

    name: ClassVar[str] = "static"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def prepare(self) -> None:
        """Nothing that the engine's own warm-up has not done."""

    def run(self) -> Pass:
        return barrier(self._workload.engine(), self._workload.requests)

    def conditions(self) -> dict[str, Any]:
        return {"prompts": len(self._workload.requests), "rows": self._workload.rows, "admission": "batch by batch"}


class Single:
    """The same engine with one row. Runs as many prompts, spread over the set, as the budget allows."""

    name: ClassVar[str] = "single"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._requests: list[Request] = []

    def prepare(self) -> None:
        """The warm-up runs prompts until the budget is spent; those are the prompts of every round."""
        started = time.perf_counter()
        for request in spread(self._workload.requests):
            self._requests.append(request)
            continuous(self._workload.engine(1), [request])
            if len(self._requests) >= LEAST_PROMPTS and time.perf_counter() - started > self._workload.budget_s:
                break

    def run(self) -> Pass:
        return continuous(self._workload.engine(1), self._requests)

    def conditions(self) -> dict[str, Any]:
        return {"prompts": len(self._requests), "rows": 1, "subset": "spread evenly over the set, within the budget"}


def shortened(requests: Sequence[Request], tokens: int = WARM_UP_TOKENS) -> list[Request]:
    """The same prompts with answers of a few tokens."""
    return [with_params(request, max_new_tokens=min(tokens, request.params.max_new_tokens)) for request in requests]


def with_params(request: Request, **changes: Any) -> Request:
    """The request with some sampling parameters changed, validated like any other."""
    params = SamplingParams(**{**request.params.model_dump(exclude_unset=True), **changes})
    return Request(request.id, request.prompt_ids, params)
