"""How many rows fit: planned from free memory before they start, corrected when the plan was wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from worker.engine.cache import capacity_for
from worker.engine.models.decoders import AnyDecoder
from worker.engine.models.spec import DecoderConfig
from worker.engine.placement import layer_devices

SHARE = 0.5
"""Of what is free beside a step's own tensors; the rest is for slots that grow by being copied, and for others."""
UNKNOWN = 1 << 40


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes for the keys and values of all running rows."""

    budget: int
    bytes_per_position: int

    def need(self, positions: int) -> int:
        """Bytes of the slot that holds `positions`."""
        return capacity_for(positions) * self.bytes_per_position

    def rows(self, positions: int) -> int:
        """Rows of that size that fit together."""
        return self.budget // self.need(positions)

    def longest(self) -> int:
        """Positions of the largest single row that fits."""
        capacity = capacity_for(1)
        while self.need(2 * capacity) <= self.budget:
            capacity *= 2
        return capacity if self.need(capacity) <= self.budget else 0


def plan_memory(
    decoder: AnyDecoder, bytes_per_position: int, max_step_tokens: int, budget: int | None = None
) -> MemoryPlan:
    """The plan for a loaded decoder; `budget` in bytes, None for what is free."""
    if budget is None:
        places = layer_devices(decoder)
        left = {place: max(0, free_bytes(place) - step_bytes(decoder, max_step_tokens)) for place in set(places)}
        # Each device holds its layers' part of every position; the one with the least room for its part decides.
        budget = int(min(left[place] * len(places) / places.count(place) for place in left) * SHARE)
    return MemoryPlan(budget, bytes_per_position)


def step_bytes(decoder: AnyDecoder, positions: int) -> int:
    """Roughly the tensors of one step: residual stream and norms, queries to values, the MLP's, one logits slice."""
    c = decoder.config
    wide = 6 * c.hidden_size + 2 * (c.heads + 2 * c.kv_heads) * c.head_dim + _mlp_width(c)
    return positions * wide * decoder.dtype.itemsize + (512 << 20)


def _mlp_width(c: DecoderConfig) -> int:
    """Numbers per position: gate, up and their product. With experts, for each that it goes to: gate and up twice,
    while the experts' products are put together, and its output, again in float32."""
    if c.experts is None:
        return 3 * c.intermediate_size
    e = c.experts
    chosen = e.top_k * (3 * c.hidden_size + 4 * e.intermediate_size)
    return max(3 * c.intermediate_size, chosen + 3 * e.shared_intermediate_size)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on `device`: what torch holds unused on a GPU counts, a container's limit too."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_available(), _left_in_container())


def is_out_of_memory(error: Exception) -> bool:
    """torch has an error of its own for GPUs only."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return UNKNOWN  # not Linux
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) << 10


def _left_in_container() -> int:
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return UNKNOWN
