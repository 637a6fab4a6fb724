"""How many rows fit where sliding layers hold only the last of a row's text."""

from __future__ import annotations

from dataclasses import dataclass

from worker.engine.canvas.model import CanvasModel
from worker.engine.canvas.spec import CanvasSpec
from worker.engine.memory import SHARE, free_bytes


@dataclass(frozen=True)
class CanvasMemory:
    """Bytes for the keys and values of all running rows."""

    budget: int
    full: int  # bytes of a position in layers that hold everything
    sliding: int  # … in layers that hold no more than `window` positions
    window: int

    def need(self, positions: int) -> int:
        """Bytes of a row with so many positions of finished text."""
        return positions * self.full + min(positions, self.window) * self.sliding

    def rows(self, positions: int) -> int:
        """Rows of that size that fit together."""
        return self.budget // self.need(positions)

    def longest(self) -> int:
        """Positions of the largest single row that fits."""
        if self.budget < self.need(self.window):
            return self.budget // (self.full + self.sliding)
        return (self.budget - self.window * self.sliding) // self.full


def plan_memory(spec: CanvasSpec, model: CanvasModel, max_step_tokens: int, budget: int | None) -> CanvasMemory:
    """The plan for a loaded model; `budget` in bytes, None for what is free."""
    if budget is None:
        budget = int(max(0, free_bytes(model.device) - step_bytes(spec, model, max_step_tokens)) * SHARE)
    full, sliding = model.position_bytes()
    return CanvasMemory(budget, full, sliding, spec.decoder.window - 1)


def step_bytes(spec: CanvasSpec, model: CanvasModel, positions: int) -> int:
    """Roughly the tensors of one step: residual stream, attention, each token's experts, one canvas of logits."""
    c = model.config
    attention = 4 * c.num_attention_heads * spec.text["global_head_dim"]
    experts = c.top_k_experts * (2 * c.hidden_size + 3 * c.moe_intermediate_size)
    wide = 8 * c.hidden_size + attention + 3 * c.intermediate_size + experts
    logits = 5 * 4 * spec.decoder.canvas_length * spec.decoder.vocab_size
    return int(positions * wide * model.dtype.itemsize + logits)
