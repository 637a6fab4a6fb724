"""A row: one prompt being denoised. It says what its next forward computes and takes what that forward decided.

Its kinds (`causal_context.py`, `block_causal.py`, `bidirectional.py`, `causal.py`) differ in what they forward and in
what they may see; everything else (rules, stopping, limits) is the same. A row knows nothing of its neighbours, of
tensors or of where its keys and values lie.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto

from contract.errors import PromptError
from worker.engine.models.spec import ModelSpec
from worker.engine.request import Finished, Plan, Request, Span, Target
from worker.engine.unmasking import RULES
from worker.engine.unmasking.fixed_steps import quota

EDIT_STEPS = 16
"""A block whose masks are gone may be edited for so many steps; two tokens could displace each other for ever."""


class State(Enum):
    """Where a row stands; COMMITTING exists only where finished blocks are cached."""

    PREFILLING = auto()
    DENOISING = auto()
    COMMITTING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Row(ABC):
    """State common to all kinds. The canvas is the prompt and what follows it, mask ids where undecided."""

    key: int
    request: Request
    plan: Plan
    spec: ModelSpec
    canvas: list[int] = field(init=False)
    state: State = field(init=False, default=State.PREFILLING)
    prefilled: int = field(init=False, default=0)  # prompt positions whose keys and values are stored for good
    entered: bool = field(init=False, default=True)  # False: what is known of the prompt is not taken over yet
    block_start: int = field(init=False)
    steps: int = field(init=False, default=0)  # denoise forwards
    forwards: int = field(init=False, default=0)  # denoise and commit forwards
    positions: int = field(init=False, default=0)  # positions computed, prefill included
    error: PromptError | None = field(init=False, default=None)
    admitted_at: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.canvas = list(self.request.prompt_ids)
        self.block_start = self.prompt_length
        self._block_masks = 0
        self._block_step = 0
        self._edits = RULES[self.plan.rule].edits
        self._changed = False  # did the block's last step change anything?
        self._edit_steps = 0  # steps of this block in which only edits were possible

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def limit(self) -> int:
        """The canvas position at which the answer must end."""
        return self.prompt_length + self.plan.max_new_tokens

    @property
    def final_end(self) -> int:
        """Up to where the canvas holds tokens that nothing changes any more: whole blocks."""
        return self.block_start

    @property
    def answer_start(self) -> int:
        """The active block's first position that is not prompt."""
        return max(self.block_start, self.prompt_length)

    @property
    def context_block(self) -> int:
        """Finished text sees whole blocks of so many positions, which prefill cannot cut: 1 where it is causal."""
        return 1

    @property
    def context_origin(self) -> int:
        """Where the first of those blocks begins that is a whole one."""
        return 0

    @property
    def most_positions(self) -> int:
        """Canvas positions that the row may come to hold."""
        return self.limit

    @property
    def block_end(self) -> int:
        return self.block_start + self.plan.block_length

    @abstractmethod
    def next_length(self) -> int:
        """Positions of the next forward; only prefill can be cut shorter."""

    @abstractmethod
    def span(self, budget: int) -> Span:
        """The next forward, at most `budget` positions where it can be cut (prefill)."""

    @abstractmethod
    def receive(self, span: Span, tokens: Items[int | None]) -> None:
        """Take the forward's outcome: for each target of `span` the accepted token, or None."""

    def number(self) -> float:
        """The rule's number for the next decision: τ, γ, f or this step's quota."""
        if self.plan.rule == "fixed_steps":
            return self._quota()
        return self.plan.number

    def _quota(self) -> int:
        return quota(self._block_masks, self._block_steps(self.block_start), self._block_step)

    def fail(self, error: PromptError) -> None:
        """End the row with an error."""
        self.error, self.state = error, State.FINISHED

    def final(self, since: int = 0) -> list[int]:
        """The answer's final tokens from the `since`-th on, up to its first stop token."""
        start = self.prompt_length + since
        return self.canvas[start : self._stop_between(start, min(self.final_end, self.limit))]

    def finished(self, tokens: int | None = None) -> Finished:
        """The row's result; call once it is FINISHED, or with how many of its final `tokens` are the answer."""
        end = self._answer_end() if tokens is None else self.prompt_length + tokens
        return Finished(
            id=self.request.id,
            prompt_tokens=self.prompt_length,
            token_ids=tuple(self.canvas[self.prompt_length : end]),
            finish_reason="stop" if end < self.limit or tokens is not None else "length",
            plan=self.plan,
            steps=self.steps,
            forwards=self.forwards,
            positions=self.positions,
            seconds=time.perf_counter() - self.admitted_at,
            error=self.error,
        )

    def _masked(self, start: int, end: int) -> list[int]:
        return [p for p in range(start, end) if self.canvas[p] == self.spec.mask_id]

    def _place(self, span: Span, tokens: Items[int | None]) -> None:
        for target, token in zip(span.targets, tokens, strict=True):
            if token is not None:
                self.canvas[target.position] = token
        self.positions += len(span.tokens)
        if self._ended() and self._settled():
            self.state = State.FINISHED

    def _begin_block(self, start: int, masks: int) -> None:
        self.block_start, self._block_masks, self._block_step = start, masks, 0
        self._changed, self._edit_steps = False, 0

    def _targets(self, start: int, end: int, read_from: int) -> list[Target]:
        """What of start … end to predict: masks; where the rule edits, what was placed as well, up to a stop token.

        Position p is read at offset p - read_from.
        """
        if not self._edits:
            return [Target(position - read_from, position) for position in self._masked(start, end)]
        positions = range(start, self._decisive_stop(end))
        return [Target(position - read_from, position, token=self._standing(position)) for position in positions]

    def _standing(self, position: int) -> int | None:
        token = self.canvas[position]
        return None if token == self.spec.mask_id else token

    def _decisive_stop(self, end: int) -> int:
        """Behind the block's first stop token if no mask stands before it, else `end`."""
        for position in range(self.answer_start, end):
            if self.canvas[position] == self.spec.mask_id:
                break
            if self.canvas[position] in self.spec.stop_ids:
                return position + 1
        return end

    def _settled(self) -> bool:
        """Are placed tokens final? Where the rule edits, once a step has changed nothing."""
        return not (self._edits and self._changed) or self._edit_steps >= EDIT_STEPS

    def _count_step(self, span: Span, tokens: Items[int | None]) -> None:
        self._changed = any(token is not None for token in tokens)
        self._edit_steps += all(target.token is not None for target in span.targets)
        self.steps += 1
        self.forwards += 1
        self._block_step += 1

    def _block_steps(self, start: int) -> int:
        """A block's share of `denoise_steps`: an even split, the first blocks taking the remainder, at least one."""
        blocks = -(-self.plan.max_new_tokens // self.plan.block_length)
        block = (start - self.prompt_length) // self.plan.block_length
        return max(1, quota(self.plan.denoise_steps, blocks, block))

    def _answer_end(self) -> int:
        """Where the answer ends if it ends now: the first stop token, else the limit."""
        length = min(self.limit, len(self.canvas))
        end = self._stop_between(self.prompt_length, length)
        return end if end < length else self.limit

    def _stop_between(self, start: int, end: int) -> int:
        """The first stop token from `start` on and before `end`, else `end`."""
        stops = self.spec.stop_ids
        return next((at for at in range(start, end) if self.canvas[at] in stops), end)

    def _ended(self) -> bool:
        """No mask before the first stop token or the limit. Blocks before the active one hold no mask."""
        for position in range(self.answer_start, min(self.limit, len(self.canvas))):
            token = self.canvas[position]
            if token in self.spec.stop_ids:
                return True
            if token == self.spec.mask_id:
                return False
        return len(self.canvas) >= self.limit
