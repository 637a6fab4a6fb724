"""Rows -> one ragged forward -> predictions where a mask stands.

All rows' spans are packed end to end, so linear layers see no padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from contract.sampling import Rule
from worker.engine.attention import AttentionPlan
from worker.engine.cache import Slots
from worker.engine.history import History
from worker.engine.models.decoders import AnyDecoder
from worker.engine.models.spec import ModelSpec
from worker.engine.placement import layer_devices
from worker.engine.request import Span
from worker.engine.sampling import Draw, Prediction, log_probabilities, predict, uniform
from worker.engine.sequence import Row
from worker.engine.stats import Stopwatch
from worker.engine.transfer import to_device
from worker.engine.unmasking import RULES
from worker.engine.unmasking.rule import Candidates


class ModelRunner:
    """Owns the decoder and the slots; runs one step for the rows it is given. Call under `torch.inference_mode`."""

    def __init__(self, spec: ModelSpec, decoder: AnyDecoder) -> None:
        self.spec = spec
        self.decoder = decoder
        self.slots = Slots(spec.decoder, decoder.dtype, layer_devices(decoder))
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
        return to_device(values, dtype, self.decoder.device)

    def _forward(self, rows: Items[Row], spans: Items[Span], watch: Stopwatch) -> Tensor:
        """Hidden states (N, d) at the targets of all spans, in order."""
        for row, span in zip(rows, spans, strict=True):
            self.slots.reserve(row.key, span.end)
        self.last_attention = attention = AttentionPlan(self.decoder, self.slots, rows, spans)
        tokens = self._tensor([token for span in spans for token in span.tokens], torch.int64)
        positions = self._tensor([p for span in spans for p in span.positions], torch.int64)
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
                distance=self._distance(members, width) if RULES[rule].needs_distance else None,
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

    def _distance(self, members: Items[Member], width: int) -> Tensor:
        """(R, K) float32: how many positions each target is from its row's first one."""
        rows = [[target.position for target in member.span.targets] for member in members]
        return self._tensor([[p - row[0] for p in row] + [0] * (width - len(row)) for row in rows], torch.float32)

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
