"""transformers' ModernBERT under the plain samplers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import ModernBertForMaskedLM

from tests.engine.reference import Reference

HIDDEN = torch.finfo(torch.float32).min


class ModernBertReference(Reference):
    """The checkpoint in `folder`, read by transformers itself."""

    def __init__(self, folder: Path) -> None:
        self._model = ModernBertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.shift = 0

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        """Local layers see 64 positions to either side of their own, of what is visible at all."""
        at = torch.tensor(positions)
        near = (at[:, None] - at[None, :]).abs() <= 64
        seen = {"full_attention": visible, "sliding_attention": visible & near}
        masks = {kind: torch.zeros(one.shape).masked_fill(~one, HIDDEN)[None, None] for kind, one in seen.items()}
        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor([tokens]), position_ids=at[None], attention_mask=masks)
        logits: Tensor = out.logits[0]
        return logits
