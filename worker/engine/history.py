"""How far predictions moved since a row's step before; kept only for rows whose rule asks.

A row's log-probabilities stay on the device until its next step or its release: masks of a block x vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What a row's last step predicted at K masked positions."""

    where: dict[int, int]  # canvas position -> index into K
    log_p: Tensor  # (K, V) float32
    moved: Tensor  # (K,) float32: KL to the step before it, +inf where there was none


class History:
    """The last step of each row, by the row's key."""

    def __init__(self) -> None:
        self._last: dict[int, Step] = {}

    def __len__(self) -> int:
        return len(self._last)

    def divergence(self, key: int, positions: list[int], log_p: Tensor) -> Tensor:
        """Remember this step, log_p (K, V) at `positions`. The larger KL of this and the last step: (K,), in nats.

        +inf where two steps have not been seen: a position is new in the first step that has it.
        """
        last = self._last.get(key)
        moved = log_p.new_full((len(positions),), torch.inf)
        result = moved
        if last is not None and any(position in last.where for position in positions):
            known = [last.where.get(position, -1) for position in positions]
            at = torch.tensor(known).to(log_p.device, non_blocking=True)
            moved = _kl(log_p, last.log_p[at]).masked_fill(at < 0, torch.inf)
            result = torch.maximum(moved, last.moved[at])
        self._last[key] = Step({position: index for index, position in enumerate(positions)}, log_p, moved)
        return result

    def release(self, key: int) -> None:
        self._last.pop(key, None)


def _kl(now: Tensor, before: Tensor) -> Tensor:
    """KL(now ‖ before) in nats from log-probabilities (K, V) each -> (K,). What has no probability adds nothing."""
    p = now.exp()
    return torch.where(p > 0, p * (now - before), 0.0).sum(-1)
