"""The protocol of an unmasking rule: which predicted positions of a row are accepted in this step.

A rule is stateless and sees R rows at once, each with up to K masked positions of its active block, from left to
right, padded. Rows bring their own number: a threshold, an entropy bound or a quota. At least one is always accepted.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor


class UnmaskingRule(Protocol):
    """One acceptance rule."""

    needs_entropy: ClassVar[bool]

    def accept(self, confidence: Tensor, entropy: Tensor, valid: Tensor, number: Tensor) -> Tensor:
        """confidence (R, K), entropy (R, K), valid (R, K) bool, number (R, 1) -> accepted (R, K) bool.

        Where `valid` is False, confidence is -inf and entropy +inf.
        """


def with_best(accepted: Tensor, confidence: Tensor, valid: Tensor) -> Tensor:
    """`accepted` within `valid`, plus each row's most confident position, so that every step decides something."""
    best = torch.zeros_like(valid).scatter_(-1, confidence.argmax(-1, keepdim=True), True)
    return (accepted | best) & valid
