"""Left-to-right threshold: the first masked position, then on to the right while the confidence reaches τ."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor


class LeftToRight:
    """Accept the first position and those after it up to the first c < τ, `number` being τ."""

    needs_entropy: ClassVar[bool] = False

    def accept(self, confidence: Tensor, entropy: Tensor, valid: Tensor, number: Tensor) -> Tensor:
        sure = confidence >= number
        sure[:, 0] = True
        return sure.long().cumprod(-1).bool() & valid
