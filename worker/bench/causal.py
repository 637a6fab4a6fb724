"""The honest rival at large batch: this engine running the base model autoregressively.

A row with blocks of one token is autoregressive: each commit predicts the next block's only slot, so that no denoise
step is left to do.
"""

from __future__ import annotations

from typing import Any, ClassVar

from worker.bench.base import load_base
from worker.bench.driving import Pass, continuous
from worker.bench.systems import Workload, engine_of, shortened, with_params
from worker.engine import Loaded, Request


class Causal:
    """The base through this engine, one token a forward, admission at every step."""

    name: ClassVar[str] = "causal"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._requests = [autoregressive(request) for request in workload.requests]
        self._loaded: Loaded | None = None

    def prepare(self) -> None:
        self._loaded = load_base(self._workload.base, self._workload.loaded)
        self._run(shortened(self._requests[: self._workload.rows]))

    def run(self) -> Pass:
        return self._run(self._requests)

    def _run(self, requests: list[Request]) -> Pass:
        assert self._loaded is not None, "prepare() comes first"
        engine = engine_of(self._loaded, self._workload.rows, self._workload.max_step_tokens)
        return continuous(engine, requests)

    def conditions(self) -> dict[str, Any]:
        return {"prompts": len(self._requests), "rows": self._workload.rows, "block_length": 1, "model": "base"}


def autoregressive(request: Request) -> Request:
    """The request, greedy, in blocks of one token; no rule has a choice left, so the cheapest one is named."""
    return with_params(request, block_length=1, rule="left_to_right", denoise_steps=None, threshold=None)
