"""The gated MLP of Llama's kind, which is also what an expert is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.linear import Linear, MakeLinear


class SwiGLU:
    """x (T, d) -> down(silu(gate(x)) * up(x)) (T, d); gate and up are one matrix."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, linear: MakeLinear = Linear) -> None:
        self.gate_up = linear(torch.cat([gate, up]))  # (2 * intermediate, d)
        self.down = linear(down)  # (d, intermediate)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


def gated(gate_up: Tensor) -> Tensor:
    """(T, 2 * intermediate) -> (T, intermediate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Its weights as a checkpoint holds them."""
    wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    return {"gate": wide, "up": wide, "down": narrow}
