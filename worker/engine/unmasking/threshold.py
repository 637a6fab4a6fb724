"""Threshold: every position whose confidence reaches τ (Fast-dLLM's parallel decoding)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import with_best


class Threshold:
    """Accept c ≥ τ, `number` being τ."""

    needs_entropy: ClassVar[bool] = False

    def accept(self, confidence: Tensor, entropy: Tensor, valid: Tensor, number: Tensor) -> Tensor:
        return with_best(confidence >= number, confidence, valid)
