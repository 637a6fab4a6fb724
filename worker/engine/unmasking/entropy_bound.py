"""Entropy bound: as many of the most certain positions as keep the joint error small (EB-sampler)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates


class EntropyBound:
    """Entropies sorted upwards: accept the first k while ΣH - max H ≤ γ over those k, `number` being γ.

    ΣH - max H bounds the mutual information that deciding the k positions independently ignores.
    """

    needs_entropy: ClassVar[bool] = True
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        assert seen.entropy is not None
        ordered, order = seen.entropy.masked_fill(~seen.valid, 1e9).sort(dim=-1, stable=True)
        # The first is always within: its own entropy is the maximum, which leaves a sum of 0.
        within = ordered.cumsum(-1) - ordered <= seen.number
        return within.new_zeros(within.shape).scatter(-1, order, within) & seen.valid
