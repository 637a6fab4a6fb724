"""What the engine did so far, in sums. Differences between two readings describe a stretch of work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from worker.engine.request import Span


@dataclass(frozen=True)
class EngineStats:
    """Running totals since the engine started.

    A forward of mixed phases is one computation; its seconds are shared among the phases by their positions.
    """

    steps: int = 0
    rows: int = 0  # summed over steps
    prefill_positions: int = 0
    denoise_positions: int = 0
    commit_positions: int = 0
    needed_positions: int = 0  # those of the above that no row could have done without
    predictions: int = 0  # masked positions for which logits were taken
    attention_cells: int = 0  # query-key pairs that were wanted
    attention_padded: int = 0  # query-key pairs that were computed
    prefill_s: float = 0.0
    denoise_s: float = 0.0
    commit_s: float = 0.0
    logits_s: float = 0.0  # head, rules and the transfer to the host
    host_s: float = 0.0  # everything that is not tensor work

    @property
    def positions(self) -> int:
        """Positions computed by the linear layers."""
        return self.prefill_positions + self.denoise_positions + self.commit_positions

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.denoise_s + self.commit_s + self.logits_s + self.host_s

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: EngineStats) -> EngineStats:
        return EngineStats(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


class Stopwatch:
    """Seconds by kind of work within one step. `exact` waits for the device at each lap, which costs it its lead."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self._wait = exact and device.type == "cuda"
        self._device = device
        self._last = time.perf_counter()
        self.seconds = {"host": 0.0, "forward": 0.0, "logits": 0.0}

    def lap(self, kind: str) -> None:
        """What passed since the last lap was work of this kind."""
        if self._wait:
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[kind] += now - self._last
        self._last = now


def step_stats(spans: Sequence[Span], cells: int, padded: int, watch: Stopwatch) -> EngineStats:
    """The totals of one step."""
    commit = sum(span.committed for span in spans)
    prefill = sum(span.prefilled for span in spans)
    denoise = sum(span.fresh for span in spans)
    each = watch.seconds["forward"] / max(1, prefill + denoise + commit)
    return EngineStats(
        steps=1,
        rows=len(spans),
        prefill_positions=prefill,
        denoise_positions=denoise,
        commit_positions=commit,
        needed_positions=sum(span.needed for span in spans),
        predictions=sum(len(span.targets) for span in spans),
        attention_cells=cells,
        attention_padded=padded,
        prefill_s=each * prefill,
        denoise_s=each * denoise,
        commit_s=each * commit,
        logits_s=watch.seconds["logits"],
        host_s=watch.seconds["host"],
    )
