"""Entropy threshold: every position that is certain enough for how far it is from the first one (WeDLM)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class EntropyThreshold:
    """Accept H + α d < τ, else the least of these; `number` is τ, `bound` α, d the distance from the first mask."""

    needs_entropy: ClassVar[bool] = True
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = True
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        assert seen.entropy is not None
        assert seen.distance is not None
        charged = seen.entropy + seen.bound * seen.distance
        return or_best(charged < seen.number, -charged, seen.valid)
