"""transformers' encoders under the plain samplers, each reading the checkpoint by itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import BertForMaskedLM, ModernBertForMaskedLM

from tests.engine.reference import Reference


class BertReference(Reference):
    """BERT: every layer sees what is visible."""

    def __init__(self, folder: Path) -> None:
        self._model = BertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.shift = 0

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        return self._logits(tokens, positions, additive(visible))

    def _logits(self, tokens: list[int], positions: list[int], mask: Tensor | dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            ids, places = torch.tensor([tokens]), torch.tensor([positions])
            logits: Tensor = self._model(input_ids=ids, position_ids=places, attention_mask=mask).logits[0]
        return logits


class ModernBertReference(BertReference):
    """ModernBERT: local layers see 64 positions to either side of their own, of what is visible at all."""

    def __init__(self, folder: Path) -> None:
        self._model = ModernBertForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
        self.shift = 0

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        at = torch.tensor(positions)
        near = (at[:, None] - at[None, :]).abs() <= 64
        masks = {"full_attention": additive(visible), "sliding_attention": additive(visible & near)}
        return self._logits(tokens, positions, masks)


def additive(visible: Tensor) -> Tensor:
    """(T, T) bool -> (1, 1, T, T)."""
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
