"""Rows -> one ragged forward -> predictions where a mask stands.

All rows' spans are packed end to end, so linear layers see no padding. Attention runs per slot class: spans of equal
length are one call over neighbouring slots, each query seeing its own row's first `visible` keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from contract.sampling import Rule
from worker.engine.cache import SlotClass, Slots
from worker.engine.history import History
from worker.engine.models.decoder import Decoder
from worker.engine.models.spec import ModelSpec
from worker.engine.request import Span
from worker.engine.sampling import Draw, Prediction, log_probabilities, predict, uniform
from worker.engine.sequence import Row
from worker.engine.stats import Stopwatch
from worker.engine.unmasking import RULES
from worker.engine.unmasking.rule import Candidates

ALONE = 64
"""A span of at least this many queries fills an attention call by itself."""


class ModelRunner:
    """Owns the decoder and the slots; runs one step for the rows it is given. Call under `torch.inference_mode`."""

    def __init__(self, spec: ModelSpec, decoder: Decoder) -> None:
        self.spec = spec
        self.decoder = decoder
        self.slots = Slots(spec.decoder, decoder.dtype, decoder.device)
        self.history = History()

    def run(self, rows: Items[Row], spans: Items[Span], watch: Stopwatch) -> list[list[int | None]]:
        """One forward over `spans`; for each row the accepted token of each of its targets, or None.

        A prediction that is not a number comes back as -1: the row must be failed.
        """
        hidden = self._forward(rows, spans, watch)
        watch.lap("forward")
        if not any(span.targets for span in spans):
            return [[] for _ in spans]
        return self._decide(rows, spans, hidden, watch)

    def release(self, row: Row) -> None:
        """Free the row's keys and values, and what was kept of its predictions."""
        self.slots.release(row.key)
        self.history.release(row.key)

    def _tensor(self, values: Items[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.decoder.device, non_blocking=True)

    def _forward(self, rows: Items[Row], spans: Items[Span], watch: Stopwatch) -> Tensor:
        """Hidden states (N, d) at the targets of all spans, in order."""
        for row, span in zip(rows, spans, strict=True):
            self.slots.reserve(row.key, span.end)
        self.last_attention = attention = AttentionPlan(self, rows, spans)
        tokens = self._tensor([token for span in spans for token in span.tokens], torch.int64)
        positions = self._tensor([p for span in spans for p in range(span.start, span.end)], torch.int64)
        wanted, first = [], 0
        for span in spans:
            wanted += [first + target.offset for target in span.targets]
            first += len(span.tokens)
        at_targets = self._tensor(wanted, torch.int64)
        watch.lap("host")
        return self.decoder.hidden(tokens, positions, attention, at_targets)

    def _decide(self, rows: Items[Row], spans: Items[Span], hidden: Tensor, watch: Stopwatch) -> list[list[int | None]]:
        needs_entropy = any(RULES[row.plan.rule].needs_entropy for row in rows)
        prediction = predict(hidden, self.decoder.head, self.spec.mask_id, needs_entropy, self._draws(rows, spans))
        # One transfer to the host per step: token where accepted, -2 where not, -1 where not a number.
        decided = self._accept(rows, spans, hidden, prediction).tolist()
        watch.lap("logits")
        out: list[list[int | None]] = []
        first = 0
        for span in spans:
            mine = decided[first : first + len(span.targets)]
            out.append([None if token == -2 else token for token in mine])
            first += len(span.targets)
        return out

    def _accept(self, rows: Items[Row], spans: Items[Span], hidden: Tensor, prediction: Prediction) -> Tensor:
        """(N,) int64: the token where the row's rule accepts it."""
        by_rule: dict[Rule, list[Member]] = defaultdict(list)
        first = 0
        for row, span in zip(rows, spans, strict=True):
            if span.targets:
                by_rule[row.plan.rule].append(Member(row, span, first))
            first += len(span.targets)
        certain = self._tensor([target.certain for span in spans for target in span.targets], torch.bool)
        sure = prediction.confidence.masked_fill(certain, 1.0)
        entropies = None if prediction.entropy is None else prediction.entropy.masked_fill(certain, 0.0)
        decided = torch.full((first + 1,), -2, dtype=torch.int64, device=self.decoder.device)
        for rule, members in by_rule.items():
            width = max(len(member.span.targets) for member in members)
            index = self._tensor([member.index(width, padding=first) for member in members], torch.int64)  # (R, K)
            valid = index < first
            at = index.clamp_max(first - 1)
            needs_history = RULES[rule].needs_history
            standing = self._standing(members, width) if RULES[rule].edits else None
            candidates = Candidates(
                confidence=sure[at].masked_fill(~valid, -torch.inf),
                valid=valid,
                number=self._tensor([[member.row.number()] for member in members], torch.float32),
                bound=self._tensor([[member.row.plan.bound] for member in members], torch.float32),
                entropy=None if entropies is None else entropies[at].masked_fill(~valid, torch.inf),
                divergence=self._divergence(members, width, hidden) if needs_history else None,
                placed=None if standing is None else standing >= 0,
                differs=None if standing is None else standing != prediction.x0[at],
            )
            accepted = RULES[rule].accept(candidates)
            decided.scatter_(0, index.masked_fill(~accepted, first).flatten(), prediction.x0[at].flatten())
        return torch.where(prediction.confidence.isfinite(), decided[:first], -1)

    def _standing(self, members: Items[Member], width: int) -> Tensor:
        """(R, K) int64: the token that stands at each target, -1 for a mask."""
        rows = [[-1 if target.token is None else target.token for target in member.span.targets] for member in members]
        return self._tensor([row + [-1] * (width - len(row)) for row in rows], torch.int64)

    def _divergence(self, members: Items[Member], width: int, hidden: Tensor) -> Tensor:
        """(R, K) float32: how far each member's predictions moved in its last two steps."""
        rows = []
        for member in members:
            targets = member.span.targets
            mine = hidden[member.first : member.first + len(targets)]
            log_p = log_probabilities(mine, self.decoder.head, self.spec.mask_id)  # (K, V)
            moved = self.history.divergence(member.row.key, [target.position for target in targets], log_p)
            rows.append(F.pad(moved, (0, width - len(targets)), value=torch.inf))
        return torch.stack(rows)

    def _draws(self, rows: Items[Row], spans: Items[Span]) -> Draw | None:
        """The random draws of rows that sample; None when every row is greedy."""
        drawn: list[tuple[int, Row, int]] = []
        first = 0
        for row, span in zip(rows, spans, strict=True):
            if row.plan.temperature > 0:
                # What stands already was drawn once; only a sure argmax displaces it.
                masks = [(i, target.position) for i, target in enumerate(span.targets) if target.token is None]
                drawn += [(first + i, row, position) for i, position in masks]
            first += len(span.targets)
        if not drawn:
            return None
        plans = [row.plan for _, row, _ in drawn]
        return Draw(
            index=self._tensor([i for i, _, _ in drawn], torch.int64),
            temperature=self._tensor([plan.temperature for plan in plans], torch.float32),
            top_p=self._tensor([plan.top_p for plan in plans], torch.float32),
            top_k=self._tensor([plan.top_k for plan in plans], torch.int64),
            uniform=uniform(
                self._tensor([plan.seed for plan in plans], torch.int64),
                self._tensor([row.forwards for _, row, _ in drawn], torch.int64),
                self._tensor([position for _, _, position in drawn], torch.int64),
            ),
        )


@dataclass(frozen=True)
class Member:
    """A row among those of its rule; its targets are predictions `first`, first + 1, …"""

    row: Row
    span: Span
    first: int

    def index(self, width: int, padding: int) -> list[int]:
        count = len(self.span.targets)
        return [*range(self.first, self.first + count), *[padding] * (width - count)]


@dataclass(frozen=True)
class Call:
    """One attention call: R neighbouring slots of a class, q queries each, over their first `keys` keys."""

    held: SlotClass
    first: int
    rows: int
    keys: int
    gather: Tensor  # (R * q,) packed index of each query; 0 for slots that do not take part
    members: Tensor | None  # indices into R * q that take part; None: all of them
    packed: Tensor  # packed index of each of those
    mask: Tensor | None  # (R, 1, groups * q, keys) additive; None: everything is visible


class AttentionPlan:
    """How this step's queries meet the stored keys; built once, used by every layer."""

    def __init__(self, runner: ModelRunner, rows: Items[Row], spans: Items[Span]) -> None:
        self._runner = runner
        self._config = runner.spec.decoder
        self.padded_cells = 0
        self.cells = 0
        self._stores: list[tuple[SlotClass, Tensor, Tensor, Tensor]] = []
        self._calls: list[Call] = []
        by_class: dict[int, list[tuple[int, int, Span]]] = defaultdict(list)  # (slot, packed start, span)
        held_by: dict[int, SlotClass] = {}
        packed = 0
        for row, span in zip(rows, spans, strict=True):
            held, slot = runner.slots.reserve(row.key, span.end)
            held_by[held.capacity] = held
            by_class[held.capacity].append((slot, packed, span))
            packed += len(span.tokens)
        for capacity, members in by_class.items():
            self._plan_class(held_by[capacity], members)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, heads, head_dim), k and v (T, kv_heads, head_dim) -> (T, heads * head_dim)."""
        c = self._config
        for held, packed, slot, position in self._stores:
            held.data[layer, 0][slot, :, position] = k[packed]
            held.data[layer, 1][slot, :, position] = v[packed]
        out = q.new_empty(q.shape[0], c.heads * c.head_dim)
        for call in self._calls:
            self._attend(call, layer, q, out)
        return out

    def _attend(self, call: Call, layer: int, q: Tensor, out: Tensor) -> None:
        c = self._config
        groups = c.heads // c.kv_heads
        # Query heads that share a key head become further queries of it: keys are read once, none is repeated.
        mine = q.index_select(0, call.gather).view(call.rows, -1, c.kv_heads, groups, c.head_dim)
        length = mine.shape[1]
        mine = mine.permute(0, 2, 3, 1, 4).reshape(call.rows, c.kv_heads, groups * length, c.head_dim)
        keys, values = call.held.data[layer, :, call.first : call.first + call.rows, :, : call.keys]
        seen = F.scaled_dot_product_attention(mine, keys, values, attn_mask=call.mask)
        seen = seen.view(call.rows, c.kv_heads, groups, length, c.head_dim).permute(0, 3, 1, 2, 4)
        flat = seen.reshape(call.rows * length, c.heads * c.head_dim)
        out.index_copy_(0, call.packed, flat if call.members is None else flat.index_select(0, call.members))

    def _plan_class(self, held: SlotClass, members: list[tuple[int, int, Span]]) -> None:
        tensor = self._runner._tensor
        packed = [start + i for _, start, span in members for i in range(len(span.tokens))]
        slots = [slot for slot, _, span in members for _ in span.tokens]
        positions = [p for _, _, span in members for p in range(span.start, span.end)]
        self._stores.append((held, *(tensor(values, torch.int64) for values in (packed, slots, positions))))
        by_length: dict[int, list[tuple[int, int, Span]]] = defaultdict(list)
        for member in members:
            by_length[len(member[2].tokens)].append(member)
        for length, alike in by_length.items():
            if length >= ALONE:
                self._calls += [self._call(held, [one], length) for one in alike]
            else:
                self._calls.append(self._call(held, alike, length))

    def _call(self, held: SlotClass, members: list[tuple[int, int, Span]], length: int) -> Call:
        tensor = self._runner._tensor
        first = min(slot for slot, _, _ in members)
        rows = max(slot for slot, _, _ in members) - first + 1
        keys = max(max(span.visible) for _, _, span in members)
        gather = [0] * (rows * length)
        visible = [1] * (rows * length)  # an idle slot looks at one key, so that its softmax stays finite
        taking_part = []
        for slot, start, span in members:
            at = (slot - first) * length
            gather[at : at + length] = range(start, start + length)
            visible[at : at + length] = span.visible
            taking_part += range(at, at + length)
        whole = len(members) == rows
        self.cells += sum(visible[at] for at in taking_part)
        self.padded_cells += rows * length * keys
        order = range(rows * length) if whole else taking_part
        return Call(
            held=held,
            first=first,
            rows=rows,
            keys=keys,
            gather=tensor(gather, torch.int64),
            members=None if whole else tensor(taking_part, torch.int64),
            packed=tensor([gather[at] for at in order], torch.int64),
            mask=self._mask(visible, rows, length, keys),
        )

    def _mask(self, visible: list[int], rows: int, length: int, keys: int) -> Tensor | None:
        if all(count == keys for count in visible):
            return None
        device, dtype = self._runner.decoder.device, self._runner.decoder.dtype
        limit = self._runner._tensor(visible, torch.int64).view(rows, 1, length, 1)
        hidden = torch.arange(keys, device=device) >= limit
        mask = torch.zeros(rows, 1, length, keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        return mask.repeat(1, 1, self._config.heads // self._config.kv_heads, 1)
