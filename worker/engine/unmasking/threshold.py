"""Threshold: every position whose confidence reaches τ (Fast-dLLM's parallel decoding)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class Threshold:
    """Accept c ≥ τ, `number` being τ."""

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        return or_best(seen.confidence >= seen.number, seen.confidence, seen.valid)
