"""The protocol of an unmasking rule: which predicted positions of a row are accepted in this step.

A rule is stateless and sees R rows at once, each with up to K masked positions of its active block, from left to
right, padded. Rows bring their own numbers: a threshold, an entropy bound, a quota. Of masks at least one is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Up to K predicted positions of R rows; what no rule of the step asked for is None."""

    confidence: Tensor  # (R, K) float32, -inf where not valid
    valid: Tensor  # (R, K) bool, False where padded
    number: Tensor  # (R, 1) float32: τ, γ, f or this step's quota
    bound: Tensor  # (R, 1) float32: the second number of the rules that have one
    entropy: Tensor | None = None  # (R, K) float32, +inf where not valid
    divergence: Tensor | None = None  # (R, K) float32: how far the prediction moved, +inf where that is not known
    distance: Tensor | None = None  # (R, K) float32: positions from the row's first candidate
    placed: Tensor | None = None  # (R, K) bool: a token stands there
    differs: Tensor | None = None  # (R, K) bool: x0 is not what stands there


class UnmaskingRule(Protocol):
    """One acceptance rule."""

    needs_entropy: ClassVar[bool]
    needs_history: ClassVar[bool]
    needs_distance: ClassVar[bool]
    edits: ClassVar[bool]  # are placed tokens of the block candidates too?

    def accept(self, seen: Candidates) -> Tensor:
        """Which of the candidates are accepted: (R, K) bool, none that is not valid."""


def or_best(accepted: Tensor, confidence: Tensor, valid: Tensor) -> Tensor:
    """`accepted` within `valid`, or the most confident position of a row where that is none, so that all decide."""
    accepted = accepted & valid
    best = torch.zeros_like(valid).scatter_(-1, confidence.argmax(-1, keepdim=True), True)
    return torch.where(accepted.any(-1, keepdim=True), accepted, best & valid)
