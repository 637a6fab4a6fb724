"""How long steps take, by phase, for the metrics: counts in buckets, from the engine's running totals.

Written by the loop's thread once a step, a few microseconds each; read at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds to import, and `worker --help` should not
    from worker.engine import EngineStats

PHASES = ("prefill", "denoise", "commit", "logits", "host")
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class StepTimes:
    """For each phase how many steps took up to each of BUCKETS_S and how many longer, and their sum in seconds."""

    counts: dict[str, list[int]] = field(default_factory=lambda: {one: [0] * (len(BUCKETS_S) + 1) for one in PHASES})
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def observe(self, stats: EngineStats) -> None:
        """After a step: what grew since the last time. A phase that the step did not have does not count."""
        for phase in PHASES:
            total: float = getattr(stats, f"{phase}_s")
            if (seconds := total - self.sums[phase]) > 0.0:
                self.sums[phase] = total
                self.counts[phase][bisect_left(BUCKETS_S, seconds)] += 1

    def buckets(self, phase: str) -> list[tuple[str, float]]:
        """The phase's buckets as Prometheus has them: each upper bound, and how many steps took no longer."""
        seen, found = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts[phase], strict=True):
            seen += count
            found.append((bound, float(seen)))
        return found
