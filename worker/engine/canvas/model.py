"""The native model's two modes over packed rows: storing finished text, and denoising canvases."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from worker.engine.canvas.context import Stretch


class CanvasModel:
    """transformers' layers, called on rows that lie end to end. Call under `torch.inference_mode`."""

    def __init__(self, decoder: Any, encoder: Any) -> None:
        self._decoder = decoder
        self._encoder_layers = encoder.layers
        self._kinds: list[str] = decoder.text_config.layer_types
        self._softcap: float = decoder.text_config.final_logit_softcapping

    @property
    def config(self) -> Any:
        """transformers' configuration of the text stack."""
        return self._decoder.text_config

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def parameters(self) -> int:
        """Weights of the text stack and of self-conditioning; the vision tower is not loaded."""
        return sum(one.numel() for one in self._decoder.parameters())

    def position_bytes(self) -> tuple[int, int]:
        """Bytes of a position's keys and values in all full layers, and in all sliding ones."""
        full = sliding = 0
        for layer in self._decoder.layers:
            of_layer = 2 * layer.self_attn.k_proj.out_features * self.dtype.itemsize
            full, sliding = (full, sliding + of_layer) if layer.self_attn.is_sliding else (full + of_layer, sliding)
        return full, sliding

    def store(self, tokens: Tensor, stretches: Items[Stretch]) -> None:
        """Finished tokens (T,), causally: their keys and values join the contexts of `stretches`."""
        self._through(self._encoder_layers, self._decoder.embed_tokens(tokens.unsqueeze(0)), stretches)
        for stretch in stretches:
            stretch.context.length = stretch.end

    def denoise(self, tokens: Tensor, soft: Tensor, stretches: Items[Stretch]) -> Tensor:
        """Canvases (T,) and their self-conditioning (T, d) -> hidden states (T, d) for `logits`."""
        x = self._decoder.self_conditioning(self._decoder.embed_tokens(tokens.unsqueeze(0)), soft.unsqueeze(0))
        hidden: Tensor = self._decoder.norm(self._through(self._decoder.layers, x, stretches))
        return hidden.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, d) -> (n, V) float32, capped."""
        logits = torch.nn.functional.linear(hidden, self._weight).float()
        return (logits / self._softcap).tanh_().mul_(self._softcap)

    def soften(self, logits: Tensor) -> Tensor:
        """The expected embedding under `logits` (n, V): the next step's self-conditioning, (n, d).

        Logits and probabilities go through the model's dtype, as in transformers.
        """
        p = logits.to(self.dtype).softmax(-1, dtype=torch.float32).to(self.dtype)
        return (p @ self._weight) * self._decoder.embed_tokens.embed_scale.to(self.dtype)

    def no_soft(self, length: int) -> Tensor:
        """The self-conditioning of a canvas that has not been looked at: (length, d) zeros."""
        return self._weight.new_zeros(length, self._weight.shape[1])

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = self._decoder.embed_tokens.weight
        return weight

    def _through(self, layers: Any, x: Tensor, stretches: Items[Stretch]) -> Tensor:
        """x (1, T, d) through all layers."""
        positions = torch.cat([torch.arange(one.start, one.end, device=x.device) for one in stretches]).unsqueeze(0)
        rotations = {kind: self._decoder.rotary_emb(x, positions, kind) for kind in set(self._kinds)}
        for layer, kind in zip(layers, self._kinds, strict=True):
            x = layer(x, position_embeddings=rotations[kind], position_ids=positions, stretches=stretches)
        return x
