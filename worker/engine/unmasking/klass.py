"""KLASS: positions that are sure and whose distribution has stopped moving (opt-in)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class Klass:
    """Accept c > τ where KL(p now ‖ p before) < `bound` in this step and in the one before, `number` being τ."""

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = True
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        assert seen.divergence is not None
        steady = seen.divergence < seen.bound
        return or_best((seen.confidence > seen.number) & steady, seen.confidence, seen.valid)
