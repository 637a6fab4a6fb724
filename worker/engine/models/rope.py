"""Rotary position embedding: an angle for each position and pair of dimensions, plain or stretched by YaRN.

RoPE is Su et al. (2021, arXiv:2104.09864), YaRN Peng et al. (2023, arXiv:2309.00071). The two `mscale`s are
DeepSeek-V2's; queries that grow with the logarithm of their position are Llama 4's, which Ministral 3 took over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Yarn:
    """A context of `original_positions`, stretched by `factor` (which may be less than 1).

    Pairs that turn more than `beta_fast` times within the original context keep their frequency, those that turn less
    than `beta_slow` times are slowed down by `factor`, between them the share rises with the pair's index.
    `attention_factor` multiplies queries and keys; queries are also multiplied by 1 + `query_beta` · ln(1 + ⌊position /
    original_positions⌋).
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    query_beta: float = 0.0


def rope_tables(
    dim: int, theta: float, yarn: Yarn | None, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, dim), computed in float64 on the half-split layout, rounded once."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), _frequencies(dim, theta, yarn))
    angles = torch.cat((angles, angles), dim=-1)
    scale = 1.0 if yarn is None else yarn.attention_factor
    return (angles.cos() * scale).to(device, dtype), (angles.sin() * scale).to(device, dtype)


def query_scale(yarn: Yarn | None, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """What queries are multiplied by, (positions, 1, 1); None where that is 1 everywhere."""
    if yarn is None or not yarn.query_beta or positions <= yarn.original_positions:
        return None
    contexts = torch.arange(positions, dtype=torch.float64) // yarn.original_positions
    return (1 + yarn.query_beta * (1 + contexts).log()).to(device, dtype).view(-1, 1, 1)


def attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """0.1 ln(factor) + 1; where both `mscale`s are given, the quotient of the two factors weighted by them."""
    if mscale and mscale_all_dim:
        return _weighted(factor, mscale) / _weighted(factor, mscale_all_dim)
    return _weighted(factor, 1.0)


def _weighted(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Radians per position of each pair, (dim / 2,) float64."""
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return plain
    first = max(0, math.floor(_pair_that_turns(yarn.beta_fast, dim, theta, yarn)))
    last = min(dim - 1, math.ceil(_pair_that_turns(yarn.beta_slow, dim, theta, yarn)))
    slowed = (torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)
    return plain + (plain / yarn.factor - plain) * slowed.clamp(0, 1)


def _pair_that_turns(times: float, dim: int, theta: float, yarn: Yarn) -> float:
    """The index, not a whole one, of the pair with so many turns within the original context."""
    return dim * math.log(yarn.original_positions / (2 * math.pi * times)) / (2 * math.log(theta))
