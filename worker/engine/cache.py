"""Slots of keys and values, one per row, grouped by size.

A row starts in the smallest class that holds its first forward and moves to the next one as it grows, so memory
follows what rows really use, and rows of like length lie side by side in one tensor: attention over a class is one
call with little padding. Slots 0 … n-1 of a class are always the occupied ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.models.spec import DecoderConfig
from worker.engine.placement import stretches

SMALLEST = 128


class SlotClass:
    """All slots of one capacity.

    `parts`, one for each device: (layers there, 2, slots, kv_heads, capacity, head_dim), keys at 0, values at 1.
    """

    def __init__(
        self, config: DecoderConfig, capacity: int, dtype: torch.dtype, devices: Sequence[torch.device]
    ) -> None:
        self.capacity = capacity
        self.owners: list[int] = []  # row key of each occupied slot
        # Zeros, not empty memory: a stale NaN behind a mask would still poison 0 * NaN.
        shape = (2, 0, config.kv_heads, capacity, config.head_dim)
        self.parts = [torch.zeros((n, *shape), dtype=dtype, device=device) for device, n in stretches(devices)]
        self._at = [(part, layer) for part, tensor in enumerate(self.parts) for layer in range(len(tensor))]

    def layer(self, number: int) -> Tensor:
        """(2, slots, kv_heads, capacity, head_dim) of one layer."""
        part, at = self._at[number]
        return self.parts[part][at]

    def copy(self, slot: int, start: int, end: int) -> list[Tensor]:
        """What stands at positions start … end of a slot, as `paste` takes it: a tensor for each part."""
        return [part[:, :, slot, :, start:end].clone() for part in self.parts]

    def paste(self, slot: int, start: int, copied: Sequence[Tensor]) -> None:
        """Write what `copy` gave to the positions from `start` on."""
        for part, values in zip(self.parts, copied, strict=True):
            part[:, :, slot, :, start : start + values.shape[-2]] = values

    def occupy(self, owner: int) -> int:
        """A free slot for `owner`; the tensor doubles when all are taken."""
        if len(self.owners) == self.parts[0].shape[2]:
            more = max(2, len(self.owners))
            self.parts = [
                torch.cat([part, part.new_zeros((*part.shape[:2], more, *part.shape[3:]))], dim=2)
                for part in self.parts
            ]
        self.owners.append(owner)
        return len(self.owners) - 1

    def vacate(self, slot: int) -> int | None:
        """Free `slot`; the last one moves into the gap. Returns the owner that moved, if any."""
        last = len(self.owners) - 1
        moved = self.owners[last] if slot != last else None
        if moved is not None:
            self.owners[slot] = moved
        for part in self.parts:
            if moved is not None:
                part[:, :, slot] = part[:, :, last]
            part[:, :, last] = 0
        self.owners.pop()
        return moved


class Slots:
    """Where each row's keys and values lie: row key -> (class, slot)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
        """`devices`: that of each layer."""
        self.dtype = dtype
        self._make = lambda capacity: SlotClass(config, capacity, dtype, devices)
        self.bytes_per_position = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
        self._classes: dict[int, SlotClass] = {}
        self._where: dict[int, tuple[SlotClass, int]] = {}

    def __len__(self) -> int:
        """Rows that hold a slot."""
        return len(self._where)

    def reserve(self, row: int, positions: int) -> tuple[SlotClass, int]:
        """The row's slot, moved to a larger class first when it must hold more than before."""
        capacity = capacity_for(positions)
        if row not in self._where:
            return self._place(row, capacity)
        held, slot = self._where[row]
        if held.capacity >= positions:
            return held, slot
        target, new = self._place(row, capacity)
        target.paste(new, 0, held.copy(slot, 0, held.capacity))
        self._vacate(held, slot)
        return target, new

    def release(self, row: int) -> None:
        """Forget a row; unknown rows are no mistake (a row may end before its first forward)."""
        if row in self._where:
            self._vacate(*self._where.pop(row))

    def held_bytes(self) -> int:
        """Memory of all classes, free slots included."""
        return sum(part.nbytes for one in self._classes.values() for part in one.parts)

    def _place(self, row: int, capacity: int) -> tuple[SlotClass, int]:
        if capacity not in self._classes:
            self._classes[capacity] = self._make(capacity)
        chosen = self._classes[capacity]
        self._where[row] = (chosen, chosen.occupy(row))
        return self._where[row]

    def _vacate(self, held: SlotClass, slot: int) -> None:
        moved = held.vacate(slot)
        if moved is not None:
            self._where[moved] = (held, slot)


def capacity_for(positions: int) -> int:
    """The smallest class that holds `positions`: 128, 256, 512 …"""
    capacity = SMALLEST
    while capacity < positions:
        capacity *= 2
    return capacity
