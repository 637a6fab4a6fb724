"""Entropy bound: as many of the most certain positions as keep the joint error small (EB-sampler)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor


class EntropyBound:
    """Entropies sorted upwards: accept the first k while ΣH - max H ≤ γ over those k, `number` being γ.

    ΣH - max H bounds the mutual information that deciding the k positions independently ignores.
    """

    needs_entropy: ClassVar[bool] = True

    def accept(self, confidence: Tensor, entropy: Tensor, valid: Tensor, number: Tensor) -> Tensor:
        ordered, order = entropy.masked_fill(~valid, 1e9).sort(dim=-1, stable=True)
        # The first is always within: its own entropy is the maximum, which leaves a sum of 0.
        within = ordered.cumsum(-1) - ordered <= number
        return within.new_zeros(within.shape).scatter(-1, order, within) & valid
