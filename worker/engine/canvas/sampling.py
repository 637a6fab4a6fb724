"""A canvas's hidden states -> what the model would write there, how sure it is, and the next step's self-conditioning.

One canvas at a time: positions x vocabulary is a large tensor here, and its numbers are then those of the row alone.
Random numbers are a hash of (seed, draw, position), as for masks; a canvas's draws are numbered 0 (its first noise),
then 2n - 1 for what is proposed in step n, and 2n for the noise after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.canvas.model import CanvasModel
from worker.engine.sampling import uniform


@dataclass(frozen=True)
class Guess:
    """What the model says about the C positions of a canvas, at one temperature."""

    best: Tensor  # (C,) int64: the likeliest token
    proposal: Tensor  # (C,) int64: a draw
    entropy: Tensor  # (C,) float32, in nats
    soft: Tensor  # (C, d): the expected embedding


def guess(model: CanvasModel, hidden: Tensor, temperature: float, chance: Tensor) -> Guess:
    """hidden (C, d) after the last norm, chance (C,) in [0, 1) -> Guess. A draw inverts the cumulative distribution."""
    logits = model.logits(hidden).div_(temperature)  # (C, V)
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    cumulative = p.cumsum(-1)
    drawn = torch.searchsorted(cumulative, chance.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return Guess(
        best=logits.argmax(-1),
        proposal=drawn.clamp_max(p.shape[-1] - 1),  # rounding can land behind the last one
        entropy=log_p.mul_(p).sum(-1).neg(),
        soft=model.soften(logits),
    )


def chances(seed: int, draw: int, positions: Tensor) -> Tensor:
    """float32 in [0, 1) at text positions (C,)."""
    return uniform(torch.full_like(positions, seed), torch.full_like(positions, draw), positions)


def noise(seed: int, draw: int, positions: Tensor, vocab_size: int) -> Tensor:
    """Token ids (C,), uniform over the whole vocabulary."""
    return (chances(seed, draw, positions).double() * vocab_size).long()
