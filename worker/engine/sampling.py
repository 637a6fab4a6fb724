"""Hidden states -> x0 (the predicted token), its confidence, and the entropy there.

Only positions that hold a mask come here. The head is applied in slices of the vocabulary with running float32
accumulators, so a tensor of positions x vocabulary never exists on the greedy path. Random numbers are a hash of
(seed, step, position): a row draws the same ones whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.models.linear import Head, Linear

SAMPLED_AT_ONCE = 64
"""Sampled positions need the whole distribution; this many are in memory at a time."""


@dataclass(frozen=True)
class Prediction:
    """What the model says about N masked positions."""

    x0: Tensor  # (N,) int64
    confidence: Tensor  # (N,) float32: probability of x0 at temperature 1
    entropy: Tensor | None  # (N,) float32, in nats; None unless some rule asked for it


@dataclass(frozen=True)
class Draw:
    """How the positions that are sampled, not argmaxed, are drawn: (N,) each."""

    index: Tensor  # int64, which of the predicted positions
    temperature: Tensor  # float32, > 0
    top_p: Tensor  # float32
    top_k: Tensor  # int64, 0 = off
    uniform: Tensor  # float32 in [0, 1)


def predict(
    hidden: Tensor,
    head: Head,
    mask_id: int,
    want_entropy: bool,
    draw: Draw | None,
) -> Prediction:
    """hidden (N, d) after the last norm -> Prediction. The mask id is never predicted.

    With running maximum m, s = Σ e^(l-m) and t = Σ e^(l-m) (l-m): confidence = 1/s and entropy = ln s - t/s.
    """
    n = hidden.shape[0]
    top = torch.full((n,), -torch.inf, device=hidden.device)
    x0 = torch.zeros(n, dtype=torch.int64, device=hidden.device)
    s, t = torch.zeros_like(top), torch.zeros_like(top)
    for start, part in head.parts:
        logits = _logits(hidden, part, mask_id - start)  # (N, slice) float32
        slice_top, slice_x0 = logits.max(-1)
        new_top = torch.maximum(top, slice_top)
        shifted = logits - new_top.unsqueeze(-1)
        weights = shifted.exp()
        decay = (top - new_top).exp()
        if want_entropy:
            # A forbidden logit is -inf: e^-inf * -inf is NaN, its limit is 0.
            carried = torch.where(s > 0, s * (top - new_top), 0.0)
            t = decay * (t + carried) + (weights * shifted).nan_to_num(0.0).sum(-1)
        s = decay * s + weights.sum(-1)
        x0 = torch.where(slice_top > top, slice_x0 + start, x0)
        top = new_top
    entropy = s.log() - t / s if want_entropy else None
    confidence = s.reciprocal()
    if draw is not None:
        x0, confidence = x0.clone(), confidence.clone()
        for first in range(0, len(draw.index), SAMPLED_AT_ONCE):
            _draw(hidden, head, mask_id, draw, slice(first, first + SAMPLED_AT_ONCE), x0, confidence)
    return Prediction(x0, confidence, entropy)


def log_probabilities(hidden: Tensor, head: Head, mask_id: int) -> Tensor:
    """hidden (N, d) -> (N, V) float32: the whole distribution, for rules that compare it over steps."""
    return _logits(hidden, head, mask_id).log_softmax(-1)


def _logits(hidden: Tensor, head: Head | Linear, forbidden: int) -> Tensor:
    """(N, rows of `head`) float32, -inf at the row `forbidden` where there is one."""
    logits = head(hidden).float()
    if 0 <= forbidden < head.shape[0]:
        logits[:, forbidden] = -torch.inf
    return logits


def _draw(hidden: Tensor, head: Head, mask_id: int, draw: Draw, part: slice, x0: Tensor, confidence: Tensor) -> None:
    """Replace x0 and confidence at `draw.index[part]` by a draw from the tempered, filtered distribution."""
    index = draw.index[part]
    logits = _logits(hidden[index], head, mask_id)  # (n, V)
    tempered, order = (logits / draw.temperature[part].unsqueeze(-1)).sort(dim=-1, descending=True, stable=True)
    p = tempered.softmax(-1)
    rank = torch.arange(p.shape[-1], device=p.device)
    top_k = draw.top_k[part].unsqueeze(-1)
    mass_before = p.cumsum(-1) - p
    keep = ((top_k == 0) | (rank < top_k)) & (mass_before < draw.top_p[part].unsqueeze(-1))
    p = torch.where(keep | (rank == 0), p, 0.0)
    cumulative = p.cumsum(-1)
    wanted = draw.uniform[part].unsqueeze(-1) * cumulative[:, -1:]
    choice = torch.searchsorted(cumulative, wanted, right=True).clamp_max(p.shape[-1] - 1)
    # Rounding can land one past the kept tokens; the last kept one is meant.
    choice = torch.minimum(choice, keep.sum(-1, keepdim=True).clamp_min(1) - 1)
    token = order.gather(-1, choice)
    x0[index] = token.squeeze(-1)
    confidence[index] = logits.softmax(-1).gather(-1, token).squeeze(-1)


def uniform(seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
    """float32 in [0, 1) from (N,) int64 each: two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    bits = _mix(_mix(seed * _signed(0x9E3779B97F4A7C15) + step) + position)
    return ((bits >> 40) & 0xFFFFFF).float() / float(1 << 24)


def _mix(z: Tensor) -> Tensor:
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of the 64 bits (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
