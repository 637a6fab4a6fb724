"""A row: one prompt being denoised. It says what its next forward computes and takes what that forward decided.

The two kinds differ in what they forward and in what they may see; everything else (rules, stopping, limits) is the
same. A row knows nothing of its neighbours, of tensors or of where its keys and values lie.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Literal

from contract.errors import BadPrompt, PromptError
from contract.sampling import CacheKind, Commit, Rule, SamplingParams
from worker.engine.models.spec import Attention, ModelSpec
from worker.engine.unmasking import DEFAULT_BOUNDS, DEFAULT_NUMBERS, RULES
from worker.engine.unmasking.fixed_steps import quota

EDIT_STEPS = 16
"""A block whose masks are gone may be edited for so many steps; two tokens could displace each other for ever."""


class State(Enum):
    """Where a row stands; COMMITTING exists only where finished blocks are cached."""

    PREFILLING = auto()
    DENOISING = auto()
    COMMITTING = auto()
    FINISHED = auto()


@dataclass(frozen=True)
class Request:
    """A prompt as the engine takes it. `id` is the caller's own name for it."""

    id: Hashable
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Plan:
    """A row's parameters with every default resolved; fixed at admission."""

    attention: Attention
    rule: Rule
    number: float  # τ, γ or f; unused by fixed_steps, whose quota changes from step to step
    bound: float  # the second number of the rules that have one: KLASS's bound of the KL, the edit threshold
    max_new_tokens: int
    denoise_steps: int
    block_length: int
    cache: CacheKind
    cache_refresh: int  # blocks between two computations of the whole canvas
    commit: Commit
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class Target:
    """A position to predict: read at `offset` of the span, meant for canvas position `position`.

    `certain`: it is predicted from finished text alone and taken at once, whatever its confidence.
    `token`: what stands there, for rules that edit; None where it is a mask.
    """

    offset: int
    position: int
    certain: bool = False
    token: int | None = None


@dataclass(frozen=True)
class Span:
    """What one row computes in one forward.

    Tokens at canvas positions start, start+1, …; query i sees the row's first `visible[i]` keys, this span's own
    included (they are stored before anybody looks).
    """

    start: int
    tokens: list[int]
    visible: list[int]
    targets: list[Target]
    needed: int
    """Positions before the row's limit; the rest of a last block only fills it."""
    committed: int = 0
    """Leading positions that write a finished block's keys and values for good."""
    fresh: int = 0
    """Trailing positions that are being denoised. What is neither is prefill."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def prefilled(self) -> int:
        """Positions of the prompt's first pass."""
        return len(self.tokens) - self.committed - self.fresh


@dataclass(frozen=True)
class Finished:
    """How a row ended: its tokens up to the first stop token (that one left out), or the error."""

    id: Hashable
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    plan: Plan
    steps: int
    forwards: int
    positions: int
    seconds: float
    error: PromptError | None = None

    @property
    def tokens_per_forward(self) -> float:
        """Tokens gained per forward of this row, commits counted, prefill not."""
        return len(self.token_ids) / self.forwards if self.forwards else 0.0


@dataclass(eq=False)
class Row(ABC):
    """State common to both kinds. The canvas is the prompt and what follows it, mask ids where undecided."""

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

    def finished(self) -> Finished:
        """The row's result; call once it is FINISHED."""
        end = self._answer_end()
        return Finished(
            id=self.request.id,
            prompt_tokens=self.prompt_length,
            token_ids=tuple(self.canvas[self.prompt_length : end]),
            finish_reason="stop" if end < self.limit else "length",
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
        for position in range(self.block_start, end):
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
        for position in range(self.prompt_length, min(self.limit, len(self.canvas))):
            if self.canvas[position] in self.spec.stop_ids:
                return position
        return self.limit

    def _ended(self) -> bool:
        """No mask before the first stop token or the limit. Blocks before the active one hold no mask."""
        for position in range(self.block_start, min(self.limit, len(self.canvas))):
            token = self.canvas[position]
            if token in self.spec.stop_ids:
                return True
            if token == self.spec.mask_id:
                return False
        return len(self.canvas) >= self.limit


class CausalContextRow(Row):
    """Finished text is causal and cached for good; the active block sees it and all of itself. Shifted by one.

    Prefill and each commit also predict the next block's first slot, exactly as an autoregressive model would. With
    `commit: separate` that slot is taken at once and the block is denoised from its second slot on; with `fused` the
    same forward holds the next block too and is also its first denoise step: fewer forwards, more positions.
    """

    KIND: ClassVar[str] = "causal_context"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.entered = False

    @property
    def most_positions(self) -> int:
        """The last block is a whole one."""
        return self.limit + self.plan.block_length - 1

    @property
    def fused(self) -> bool:
        return self.plan.commit == "fused"

    def next_length(self) -> int:
        ahead = self.plan.block_length if self.fused else 0
        if self.state is State.PREFILLING:
            return self.prompt_length - self.prefilled + ahead
        if self.state is State.COMMITTING:
            return self.plan.block_length + ahead
        return self.plan.block_length

    def span(self, budget: int) -> Span:
        if self.state is State.PREFILLING:
            return self._prefill(budget)
        start, end = self.block_start, self.block_end
        if self.state is State.COMMITTING:
            return self._opening(start, end, committed=end - start)
        # The first slot's prediction was read before the block, with the forward that opened it.
        targets = self._targets(start + 1, min(end, self.limit), read_from=start + 1)
        length = end - start
        return Span(start, self.canvas[start:end], [end] * length, targets, min(end, self.limit) - start, fresh=length)

    def receive(self, span: Span, tokens: Items[int | None]) -> None:
        opened = span.start + len(span.tokens) - span.fresh
        if self.state is State.PREFILLING:
            self.prefilled = opened
            if span.targets:
                self._open_block(opened)
        elif self.state is State.COMMITTING:
            self.forwards += not self.fused
            self._open_block(opened)
        if span.fresh:
            self._count_step(span, tokens)
        self._place(span, tokens)
        if self.state is State.DENOISING and self._settled() and not self._masked(self.block_start, self.block_end):
            self.state = State.COMMITTING

    def _quota(self) -> int:
        if self.state is State.DENOISING:
            return super()._quota()
        start = self.prompt_length if self.state is State.PREFILLING else self.block_end
        return quota(self._masks_of(start), self._block_steps(start), 0)

    def _masks_of(self, start: int) -> int:
        """Masks that the rule decides in the block at `start`; a separate commit brings the first slot itself."""
        return min(self.limit - start, self.plan.block_length) - (not self.fused)

    def _prefill(self, budget: int) -> Span:
        start, end = self.prefilled, min(self.prompt_length, self.prefilled + budget)
        if self.fused and end == self.prompt_length:
            # The last chunk opens the block, which must fit in as well; a single position goes in any case.
            end = max(start + 1, min(end, start + budget - self.plan.block_length))
        if end == self.prompt_length:
            return self._opening(start, end, committed=0)
        return Span(start, self.canvas[start:end], list(range(start + 1, end + 1)), [], end - start)

    def _opening(self, start: int, end: int, committed: int) -> Span:
        """Causal positions up to `end`, the last of which predicts the first slot of the block that begins there."""
        visible = list(range(start + 1, end + 1))
        opening = Target(end - 1 - start, end, certain=True)
        if not self.fused:
            return Span(start, self.canvas[start:end], visible, [opening], end - start, committed)
        stop = end + self.plan.block_length
        tokens = self.canvas[start:end] + [self.spec.mask_id] * (stop - end)
        visible += [stop] * (stop - end)
        masked = range(end, min(stop, self.limit))
        targets = [opening, *(Target(position - 1 - start, position) for position in masked[1:])]
        return Span(start, tokens, visible, targets, masked.stop - start, committed, fresh=stop - end)

    def _open_block(self, start: int) -> None:
        self.canvas.extend([self.spec.mask_id] * self.plan.block_length)
        self._begin_block(start, self._masks_of(start))
        self.state = State.DENOISING


class BidirectionalRow(Row):
    """Every position sees the whole canvas, which stands there in masks from the start; blocks go left to right.

    cache `none`: each step computes the whole canvas (exact). With a cache a block's first step does so and stores
    keys and values; its later steps compute from the block on (`prefix`) or the block alone (`dual`) and see the rest
    as it was stored. With `cache_refresh` n only every n-th block computes the whole canvas; the others begin with
    the block before them, whose last tokens came after its keys and values. With a cache the canvas ends at the first
    stop token that was decided.
    """

    KIND: ClassVar[str] = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.canvas += [self.spec.mask_id] * self.plan.max_new_tokens
        self.state = State.DENOISING
        self._open_block(self.prompt_length)

    def next_length(self) -> int:
        start, end = self._bounds()
        return end - start

    def span(self, budget: int) -> Span:
        start, end = self._bounds()
        targets = self._targets(self.block_start, self._block_limit(), read_from=start)
        visible = [len(self.canvas)] * (end - start)
        return Span(start, self.canvas[start:end], visible, targets, end - start, fresh=end - start)

    def receive(self, span: Span, tokens: Items[int | None]) -> None:
        self._count_step(span, tokens)
        self._place(span, tokens)
        if self.plan.cache != "none" and not self._edits:  # an edit may still take the stop token away
            self._drop_what_follows_a_stop()
        left = self._masked(self.block_start, self._block_limit())
        if self.state is State.DENOISING and self._settled() and not left:
            self._open_block(self.block_end)

    def _drop_what_follows_a_stop(self) -> None:
        """Nothing after a stop token is seen or computed again; with no cache the canvas stays whole, as published."""
        for position in range(self.block_start, self._block_limit()):
            if self.canvas[position] in self.spec.stop_ids:
                del self.canvas[position + 1 :]
                return

    def _bounds(self) -> tuple[int, int]:
        """The part of the canvas that the next step computes."""
        block = (self.block_start - self.prompt_length) // self.plan.block_length
        refreshing = self._block_step == 0 and block % self.plan.cache_refresh == 0
        if self.plan.cache == "none" or refreshing:
            return 0, len(self.canvas)
        start = self.block_start - (self.plan.block_length if self._block_step == 0 else 0)
        return start, self._block_limit() if self.plan.cache == "dual" else len(self.canvas)

    def _block_limit(self) -> int:
        return min(self.block_end, len(self.canvas))

    def _open_block(self, start: int) -> None:
        self._begin_block(start, min(self.limit - start, self.plan.block_length))


ROWS: dict[str, type[Row]] = {row.KIND: row for row in (CausalContextRow, BidirectionalRow)}


def admit(key: int, request: Request, spec: ModelSpec) -> Row:
    """A row for `request`, its parameters resolved against the model's recommendations.

    Raises BadPrompt: `empty_prompt`, `prompt_too_long` (naming the limit) or `bad_params`.
    """
    plan = _plan(request, spec)
    return ROWS[spec.attention](key, request, plan, spec)


def _plan(request: Request, spec: ModelSpec) -> Plan:
    params = request.params
    rule = params.resolved_rule(spec.rule)
    if params.cache is not None and spec.attention == "causal_context":
        raise BadPrompt("bad_params", f"cache: family '{spec.family}' always uses its exact cache; leave it out")
    if params.commit is not None and spec.attention != "causal_context":
        raise BadPrompt("bad_params", f"commit: family '{spec.family}' commits no blocks; leave it out")
    block_length = params.block_length or spec.block_length
    limit = _room(request, spec, block_length)
    number, bound = _numbers(params, rule, spec)
    max_new_tokens = min(params.max_new_tokens, limit)
    return Plan(
        attention=spec.attention,
        rule=rule,
        number=number,
        bound=bound,
        max_new_tokens=max_new_tokens,
        denoise_steps=params.denoise_steps or max_new_tokens,
        block_length=block_length,
        cache=params.cache or "none",
        cache_refresh=params.cache_refresh or 1,
        commit=params.commit or spec.commit,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed or 0,
    )


def _numbers(params: SamplingParams, rule: Rule, spec: ModelSpec) -> tuple[float, float]:
    """The rule's number and its bound: the prompt's, else the rule's own default, else the model's threshold."""
    number = {"entropy_bound": params.entropy_bound, "factor": params.factor}.get(rule, params.threshold)
    bound = {"klass": params.kl_threshold, "joint_threshold": params.edit_threshold}.get(rule)
    return (
        DEFAULT_NUMBERS.get(rule, spec.threshold) if number is None else number,
        DEFAULT_BOUNDS.get(rule, 0.0) if bound is None else bound,
    )


def _room(request: Request, spec: ModelSpec, block_length: int) -> int:
    """Answer tokens that the context leaves; a causal context needs room for a last whole block."""
    length, context = len(request.prompt_ids), spec.decoder.max_positions
    if length == 0:
        raise BadPrompt("empty_prompt", "the prompt has no tokens")
    least = block_length if spec.attention == "causal_context" else 1
    if least >= context:
        raise BadPrompt("bad_params", f"block_length: {block_length} does not fit into a context of {context}")
    room = context - length
    room -= room % least
    if room < 1:
        raise BadPrompt(
            "prompt_too_long",
            f"the prompt has {length} tokens; the model's context of {context} leaves no room for an answer "
            f"(longest prompt: {context - least} tokens)",
        )
    return room
