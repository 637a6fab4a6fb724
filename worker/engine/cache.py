"""Slots of keys and values, one per row, grouped by size.

A row starts in the smallest class that holds its first forward and moves to the next one as it grows, so memory
follows what rows really use, and rows of like length lie side by side in one tensor: attention over a class is one
call with little padding. Slots 0 … n-1 of a class are always the occupied ones.
"""

from __future__ import annotations

import torch

from worker.engine.models.spec import DecoderConfig

SMALLEST = 128


class SlotClass:
    """All slots of one capacity. `data` (layers, 2, slots, kv_heads, capacity, head_dim): keys at 0, values at 1."""

    def __init__(self, config: DecoderConfig, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.owners: list[int] = []  # row key of each occupied slot
        # Zeros, not empty memory: a stale NaN behind a mask would still poison 0 * NaN.
        self.data = torch.zeros(
            (config.layers, 2, 0, config.kv_heads, capacity, config.head_dim), dtype=dtype, device=device
        )

    def occupy(self, owner: int) -> int:
        """A free slot for `owner`; the tensor doubles when all are taken."""
        if len(self.owners) == self.data.shape[2]:
            more = max(2, len(self.owners))
            shape = (*self.data.shape[:2], more, *self.data.shape[3:])
            self.data = torch.cat([self.data, self.data.new_zeros(shape)], dim=2)
        self.owners.append(owner)
        return len(self.owners) - 1

    def vacate(self, slot: int) -> int | None:
        """Free `slot`; the last one moves into the gap. Returns the owner that moved, if any."""
        last = len(self.owners) - 1
        moved = self.owners[last] if slot != last else None
        if moved is not None:
            self.data[:, :, slot] = self.data[:, :, last]
            self.owners[slot] = moved
        self.data[:, :, last] = 0
        self.owners.pop()
        return moved


class Slots:
    """Where each row's keys and values lie: row key -> (class, slot)."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._make = lambda capacity: SlotClass(config, capacity, dtype, device)
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
        target.data[:, :, new, :, : held.capacity] = held.data[:, :, slot]
        self._vacate(held, slot)
        return target, new

    def release(self, row: int) -> None:
        """Forget a row; unknown rows are no mistake (a row may end before its first forward)."""
        if row in self._where:
            self._vacate(*self._where.pop(row))

    def held_bytes(self) -> int:
        """Memory of all classes, free slots included."""
        return sum(one.data.numel() * one.data.element_size() for one in self._classes.values())

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
