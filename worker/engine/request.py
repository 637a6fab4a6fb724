"""What goes in and out of the engine, and what one row asks of one forward. Plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from contract.errors import PromptError
from contract.sampling import CacheKind, Commit, Rule, SamplingParams, Truncate
from worker.engine.models.spec import Attention


@dataclass(frozen=True)
class Request:
    """A prompt as the engine takes it. `id` is the caller's own name for it; `urgent` ones go before the others."""

    id: Hashable
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    urgent: bool = False


@dataclass(frozen=True)
class Plan:
    """A row's parameters with every default resolved; fixed at admission."""

    attention: Attention
    rule: Rule
    number: float  # τ, γ or f; unused by fixed_steps, whose quota changes from step to step
    bound: float  # a rule's second number: KLASS's bound of the KL, the edit threshold, the charge for distance
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
    truncate: Truncate | None
    notes: tuple[str, ...]
    """What was done to the prompt or to its parameters to make them fit."""


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

    Tokens at canvas positions start, start+1, …, and keys in as many places; query i sees the row's first
    `visible[i]` keys, this span's own included (they are stored before anybody looks).
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
    order: list[int] | None = None
    """The tokens' canvas positions where they are not put in as they stand; their keys lie as they are put in."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def positions(self) -> Sequence[int]:
        """The canvas position of each token: what it is rotated by."""
        return range(self.start, self.end) if self.order is None else self.order

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
