"""The diffusion transformer of MDLM and BD3-LM, plainly: one sequence, the noise level carried through every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tests import checkpoints
from tests.engine.reference import Reference


class DitReference(Reference):
    """The weights of `checkpoints.dit_weights` under seed 0, as the published code computes with them."""

    def __init__(self, adaln: bool = True, noise_level: float = 0.0) -> None:
        self._weights = {name.removeprefix("backbone."): w for name, w in checkpoints.dit_weights(0, adaln).items()}
        self._adaln, self._noise_level = adaln, noise_level
        self.shift = 0

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        x = self._weights["vocab_embed.embedding"][tokens]
        condition = self._condition() if self._adaln else None
        angles = torch.tensor(positions)[:, None] * self._weights["rotary_emb.inv_freq"]  # (T, head_dim / 2)
        for number in range(checkpoints.LAYERS):
            x = self._block(f"blocks.{number}.", x, condition, angles, visible)
        shift, scale = self._modulation("output_layer.", condition, 2)
        x = self._norm(x, "output_layer.norm_final") * (1 + scale) + shift
        return self._linear(x, "output_layer.linear")

    def _block(self, name: str, x: Tensor, condition: Tensor | None, angles: Tensor, visible: Tensor) -> Tensor:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self._modulation(name, condition, 6)
        seen = self._attention(name, self._norm(x, f"{name}norm1") * (1 + scale) + shift, angles, visible)
        x = x + gate * seen
        wide = self._linear(self._norm(x, f"{name}norm2") * (1 + mlp_scale) + mlp_shift, f"{name}mlp.0")
        wide = 0.5 * wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
        return x + mlp_gate * self._linear(wide, f"{name}mlp.2")

    def _attention(self, name: str, x: Tensor, angles: Tensor, visible: Tensor) -> Tensor:
        width = checkpoints.HIDDEN // checkpoints.HEADS
        q, k, v = (x @ self._weights[f"{name}attn_qkv.weight"].T).chunk(3, dim=-1)
        heads = []
        for first in range(0, checkpoints.HIDDEN, width):
            mine = slice(first, first + width)
            scores = rotated(q[:, mine], angles) @ rotated(k[:, mine], angles).T / width**0.5
            heads.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[:, mine])
        return torch.cat(heads, dim=-1) @ self._weights[f"{name}attn_out.weight"].T

    def _condition(self) -> Tensor:
        angles = self._noise_level * 10_000.0 ** (-torch.arange(128) / 128)
        waves = torch.cat([angles.cos(), angles.sin()])
        return silu(self._linear(silu(self._linear(waves, "sigma_map.mlp.0")), "sigma_map.mlp.2"))

    def _modulation(self, name: str, condition: Tensor | None, parts: int) -> tuple[Tensor, ...]:
        """Without adaptive norms: shifts and scales of 0, gates of 1."""
        if condition is None:
            zero, one = torch.zeros(checkpoints.HIDDEN), torch.ones(checkpoints.HIDDEN)
            return (zero, zero, one, zero, zero, one)[:parts]
        return self._linear(condition, f"{name}adaLN_modulation").chunk(parts)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self._weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Each dimension of the first half turned with its fellow of the second: (T, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)
