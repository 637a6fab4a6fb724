"""Fixed steps: the n most confident positions, n set by the steps that a block may take."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class FixedSteps:
    """Accept the top `number` positions by confidence (LLaDA's low-confidence schedule); ties go to the left."""

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        rank = seen.confidence.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return or_best(rank < seen.number, seen.confidence, seen.valid)


def quota(masks: int, steps: int, step: int) -> int:
    """Positions to accept in `step` (from 0) of `steps` over `masks`: ⌊M/S⌋, one more in the first M mod S steps."""
    return masks // steps + (step < masks % steps)
