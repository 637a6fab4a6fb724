"""Left-to-right threshold: the first masked position, then on to the right while the confidence reaches τ."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from worker.engine.unmasking.rule import Candidates


class LeftToRight:
    """Accept the first position and those after it up to the first c < τ, `number` being τ."""

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        sure = seen.confidence >= seen.number
        sure[:, 0] = True
        return sure.long().cumprod(-1).bool() & seen.valid
