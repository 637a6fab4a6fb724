"""Factor: as many of the most confident positions as their least confident one allows (Fast-dLLM)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from worker.engine.unmasking.rule import Candidates, or_best


class Factor:
    """Confidences sorted downwards: accept the longest prefix with c₍k₎ ≥ 1 - f / (k + 1), `number` being f.

    The bound rises with k while c₍k₎ falls, so the positions that meet it are a prefix.
    """

    needs_entropy: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    needs_distance: ClassVar[bool] = False
    edits: ClassVar[bool] = False

    def accept(self, seen: Candidates) -> Tensor:
        ordered, order = seen.confidence.sort(dim=-1, descending=True, stable=True)
        k = torch.arange(1, ordered.shape[-1] + 1, device=ordered.device)
        enough = ordered >= 1 - seen.number / (k + 1)
        accepted = torch.zeros_like(enough).scatter(-1, order, enough)
        return or_best(accepted, seen.confidence, seen.valid)
