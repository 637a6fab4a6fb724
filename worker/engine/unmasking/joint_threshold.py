"""Joint threshold: fill masks that are sure, and overwrite placed tokens that surely should be others (LLaDA2.1).

Opt-in, for models trained to edit. A block ends when it holds no mask and a step changed nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class JointThreshold:
    """Fill where c > τ, `number` being τ; overwrite a placed token where another one has c > `bound`."""

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = True

    def accept(self, seen: Candidates) -> Tensor:
        assert seen.placed is not None
        assert seen.differs is not None
        masked = seen.valid & ~seen.placed
        at_masks = seen.confidence.masked_fill(~masked, -torch.inf)
        filled = or_best(at_masks > seen.number, at_masks, masked)
        return filled | (seen.valid & seen.placed & seen.differs & (seen.confidence > seen.bound))
