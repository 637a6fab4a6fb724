"""Attention where one stored matrix gives queries, keys and values, and every head has keys of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.models.decoder import Attend
from worker.engine.models.linear import Linear


def attention(number: int, qkv: Linear, x: Tensor, heads: int, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """x (T, d) -> what each position saw in layer `number`, (T, heads * head_dim).

    Rows of the matrix lie in the order (q, k, v), head, dimension. rope: cos and sin (T, 1, head_dim), half-split.
    """
    queries_keys, v = qkv(x).view(x.shape[0], 3 * heads, -1).split([2 * heads, heads], dim=1)
    cos, sin = rope
    first, second = queries_keys.chunk(2, dim=-1)
    q, k = (queries_keys * cos + torch.cat((-second, first), dim=-1) * sin).chunk(2, dim=1)
    return attend(number, q, k, v)
