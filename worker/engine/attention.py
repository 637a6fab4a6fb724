"""Packed queries meet the stored keys of their own rows.

Attention runs per slot class: spans of equal length are one call over neighbouring slots, each query seeing its own
row's first `visible` keys. In a model's local layers a query sees those of them that are at most `window` away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.cache import SlotClass, Slots
from worker.engine.models.decoders import AnyDecoder
from worker.engine.request import Span
from worker.engine.sequence import Row
from worker.engine.transfer import to_device

ALONE = 64
"""A span of at least this many queries fills an attention call by itself."""


@dataclass(frozen=True)
class Member:
    """A span, the slot of its row, and where its queries begin among the packed ones."""

    slot: int
    packed: int
    span: Span


@dataclass(frozen=True)
class Store:
    """Where this step's keys and values go: for each of `packed` its slot and position in the class."""

    held: SlotClass
    packed: Tensor  # (n,)
    slots: Tensor  # (n,)
    positions: Tensor  # (n,)


@dataclass(frozen=True)
class Call:
    """One attention call: R neighbouring slots of a class, n queries each, over their first `keys` keys.

    Query heads that share a key head become further queries of it, so keys are read once and none is repeated.
    `read` and `write` number (packed position, head) pairs in the order (slot, key head, head of its group, query).
    """

    held: SlotClass
    first: int
    rows: int
    keys: int
    read: Tensor  # (R * heads * n,)
    write: Tensor  # (R * heads * n,); slots that do not take part write to a spare position
    mask: Tensor | None  # (R, 1, groups * n, keys) additive; None: everything is visible
    local_mask: Tensor | None  # the same in local layers; theirs is `mask` where the window holds every key


Planned = TypeVar("Planned", Store, Call)


def _to(planned: Planned, device: torch.device) -> Planned:
    """The same with its tensors on `device`."""
    values = {field.name: getattr(planned, field.name) for field in fields(planned)}
    return replace(planned, **{name: one.to(device) for name, one in values.items() if isinstance(one, Tensor)})


class AttentionPlan:
    """How this step's queries meet the stored keys; built once, used by every layer."""

    def __init__(self, decoder: AnyDecoder, slots: Slots, rows: Items[Row], spans: Items[Span]) -> None:
        self._config = decoder.config
        self._device, self._dtype = decoder.device, decoder.dtype
        self.padded_cells = 0
        self.cells = 0
        self._stores: list[Store] = []
        self._calls: list[Call] = []
        by_class: dict[SlotClass, list[Member]] = defaultdict(list)
        self._total = 0
        for row, span in zip(rows, spans, strict=True):
            held, slot = slots.reserve(row.key, span.end)
            by_class[held].append(Member(slot, self._total, span))
            self._total += len(span.tokens)
        for held, members in by_class.items():
            self._plan_class(held, members)
        self._on = {self._device: (self._stores, self._calls)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, heads, head_dim), k and v (T, kv_heads, head_dim) -> (T, heads * head_dim)."""
        stores, calls = self._on.get(q.device) or self._moved(q.device)
        for store in stores:
            held = store.held.layer(layer)
            held[0][store.slots, :, store.positions] = k[store.packed]
            held[1][store.slots, :, store.positions] = v[store.packed]
        c = self._config
        heads = q.reshape(-1, c.head_dim)
        out = q.new_empty((q.shape[0] + 1) * c.heads, c.head_dim)  # the last position is the spare one
        for call in calls:
            out.index_copy_(0, call.write, self._attend(call, layer, heads.index_select(0, call.read)))
        return out.view(-1, c.heads * c.head_dim)[:-1]

    def _moved(self, device: torch.device) -> tuple[list[Store], list[Call]]:
        """The plan for layers on another device, kept for those that follow."""
        self._on[device] = [_to(one, device) for one in self._stores], [_to(one, device) for one in self._calls]
        return self._on[device]

    def _attend(self, call: Call, layer: int, q: Tensor) -> Tensor:
        """q (R * heads * n, head_dim) -> what each saw, likewise."""
        q = q.view(call.rows, self._config.kv_heads, -1, self._config.head_dim)
        keys, values = call.held.layer(layer)[:, call.first : call.first + call.rows, :, : call.keys]
        mask = call.local_mask if layer in self._config.local_layers else call.mask
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask).reshape(-1, self._config.head_dim)

    def _plan_class(self, held: SlotClass, members: list[Member]) -> None:
        packed = [member.packed + i for member in members for i in range(len(member.span.tokens))]
        slots = [member.slot for member in members for _ in member.span.tokens]
        positions = [p for member in members for p in range(member.span.start, member.span.end)]
        self._stores.append(Store(held, *(self._tensor(values) for values in (packed, slots, positions))))
        by_length: dict[int, list[Member]] = defaultdict(list)
        for member in members:
            by_length[len(member.span.tokens)].append(member)
        for length, alike in by_length.items():
            if length >= ALONE:
                self._calls += [self._call(held, [one], length) for one in alike]
            else:
                self._calls.append(self._call(held, alike, length))

    def _call(self, held: SlotClass, members: list[Member], length: int) -> Call:
        first = min(member.slot for member in members)
        rows = max(member.slot for member in members) - first + 1
        keys = max(max(member.span.visible) for member in members)
        packed = [self._total] * (rows * length)
        visible = [1] * (rows * length)  # an idle slot looks at one key, so that its softmax stays finite
        for member in members:
            at = (member.slot - first) * length
            packed[at : at + length] = range(member.packed, member.packed + length)
            visible[at : at + length] = member.span.visible
            self.cells += sum(member.span.visible)
        self.padded_cells += rows * length * keys
        write = self._by_head(packed, rows, length)
        read = write.where(write < self._total * self._config.heads, 0)
        hidden = self._beyond(visible, rows, length, keys)
        mask = local_mask = self._additive(hidden)
        if self._config.window and keys > self._config.window + 1:
            afar = self._afar(members, first, rows, length, keys)
            local_mask = self._additive(afar if hidden is None else afar | hidden)
        return Call(held, first, rows, keys, read, write, mask, local_mask)

    def _by_head(self, packed: list[int], rows: int, length: int) -> Tensor:
        c = self._config
        head = torch.arange(c.heads, device=self._device).view(1, c.kv_heads, -1, 1)
        return (self._tensor(packed).view(rows, 1, 1, length) * c.heads + head).flatten()

    def _beyond(self, visible: list[int], rows: int, length: int, keys: int) -> Tensor | None:
        """(R, 1, n, keys) bool: keys that a query must not see; None where it sees all."""
        if all(count == keys for count in visible):
            return None
        limit = self._tensor(visible).view(rows, 1, length, 1)
        return torch.arange(keys, device=self._device) >= limit

    def _afar(self, members: list[Member], first: int, rows: int, length: int, keys: int) -> Tensor:
        """(R, 1, n, keys) bool: keys that are more than a window away from a query."""
        positions = [0] * (rows * length)
        for member in members:
            at = (member.slot - first) * length
            positions[at : at + length] = range(member.span.start, member.span.end)
        place = self._tensor(positions).view(rows, 1, length, 1)
        key = torch.arange(keys, device=self._device)
        return (key < place - self._config.window) | (key > place + self._config.window)

    def _additive(self, hidden: Tensor | None) -> Tensor | None:
        """(R, 1, groups * n, keys): what the scores are given, nothing or minus infinity."""
        if hidden is None:
            return None
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf).repeat(1, 1, self._config.heads // self._config.kv_heads, 1)

    def _tensor(self, values: list[int]) -> Tensor:
        return to_device(values, torch.int64, self._device)
