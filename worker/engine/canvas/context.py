"""A row's finished text as its canvas sees it: keys and values by layer, and how a stretch of tokens attends to them.

Layers of two kinds lie in one model: `full` ones see all that is finished, `sliding` ones the last of it. Keys and
values have a shape of their own for each kind, so that a row keeps them as tensors of its own; a canvas has queries
enough to fill an attention call by itself, and needs no mask there: it sees everything that is held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(eq=False)
class Context:
    """Keys and values (kv_heads, positions, head_dim) of one row by layer; only finished text is here."""

    length: int = 0
    held: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def followed_by(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What is held, and k and v (kv_heads, n, head_dim) behind it."""
        if layer not in self.held:
            return k, v
        keys, values = self.held[layer]
        return torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)

    def keep(self, layer: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Hold these instead, as copies that nothing else hangs on; of a sliding layer what the next token may see."""
        first = max(0, keys.shape[1] - (window - 1)) if window else 0
        keys, values = (one[:, first:].clone(memory_format=torch.contiguous_format) for one in (keys, values))
        self.held[layer] = keys, values


class Stretch:
    """Tokens of one row in one forward: finished ones that are stored (`finished`), or its canvas."""

    def __init__(self, context: Context, length: int, finished: bool) -> None:
        self.context, self.length, self.finished = context, length, finished
        self.start = context.length
        self._masks: dict[int | None, Tensor] = {}

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def cells(self) -> int:
        """Query-key pairs in a layer that sees everything."""
        return self.length * self.start + (self.length * (self.length + 1) // 2 if self.finished else self.length**2)

    @property
    def computed_cells(self) -> int:
        return self.length * self.end

    def attend(self, layer: int, window: int | None, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (heads, n, head_dim), k and v (kv_heads, n, head_dim) of this stretch -> (heads, n, head_dim)."""
        keys, values = self.context.followed_by(layer, k, v)
        mask = None
        if self.finished:
            self.context.keep(layer, keys, values, window)
            mask = self._mask(window, keys)
        q = q.unflatten(0, (keys.shape[0], -1))  # (kv_heads, heads that share them, n, head_dim)
        keys, values = (one.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for one in (keys, values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale).flatten(0, 1)

    def _mask(self, window: int | None, keys: Tensor) -> Tensor:
        """(n, keys) true where a token sees a key: itself and those before it, within the window."""
        if window not in self._masks:
            last = keys.shape[1] - self.length + torch.arange(self.length, device=keys.device).unsqueeze(1)
            behind = last - torch.arange(keys.shape[1], device=keys.device)
            self._masks[window] = (behind >= 0) & (behind < (window or self.end))
        return self._masks[window]
