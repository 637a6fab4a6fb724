"""Rows of models whose text is a chain of blocks: SDAR's kind, and Fast-dLLM v2's, which is shifted by one."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import ClassVar

from worker.engine.request import Span, Target
from worker.engine.sequence import Row, State


class BlockCausalRow(Row):
    """Each block sees all blocks before it, and itself in both directions; what is finished is cached for good.

    Blocks lie on a grid, the prompt included: its whole blocks are prefilled, what is left of it begins the first block
    that is denoised. The grid begins at position 0, or (`grid: answer`) so that one of its blocks begins with the
    answer; then the prompt's first block is the short one. A finished block is committed: computed once more with its
    final tokens, by a forward of its own (`commit: separate`) or together with the next block's first step (`fused`).
    A finished block never sees what comes after it, so both compute the same. The last block is a whole one, whose end
    may lie beyond the answer's, unless the family cuts it.

    Shifted models read a block's first slot at the end of the block before it: prefill or commit takes it at once, as
    in `causal_context.py`. There the two commits differ: with `fused` the block's first step finds the slot still
    masked. A first block that begins with prompt has no such slot.
    """

    KIND: ClassVar[str] = "block_causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._origin = self.prompt_length % self.plan.block_length if self.spec.grid == "answer" else 0
        self.entered = False
        self._open_block(self.grid_start)
        self.state = State.PREFILLING if self.grid_start else State.DENOISING

    @property
    def grid_start(self) -> int:
        """Where the first block begins that is denoised."""
        return self._border(self.prompt_length)

    @property
    def context_block(self) -> int:
        return self.plan.block_length

    @property
    def context_origin(self) -> int:
        return self._origin

    @property
    def most_positions(self) -> int:
        return self.limit if self.spec.last_block == "cut" else self._next_border(self.limit - 1)

    @property
    def block_end(self) -> int:
        return self._block_end

    @property
    def fused(self) -> bool:
        return self.plan.commit == "fused"

    def next_length(self) -> int:
        unstored = self.block_start - self._stored()
        return unstored + self._length if self.fused or not unstored else unstored

    def span(self, budget: int) -> Span:
        start, end = self._stored(), self._context_end(budget)
        stop = self._block_end if self._block_comes_along(start, end, budget) else end
        return Span(
            start,
            self.canvas[start:stop],
            self._visible(start, stop),
            self._wanted(start, end, stop),
            needed=min(stop, self.limit) - start,
            committed=end - start if self.state is State.COMMITTING else 0,
            fresh=stop - end,
        )

    def receive(self, span: Span, tokens: Items[int | None]) -> None:
        stored = span.end - span.fresh
        if self.state is State.PREFILLING:
            self.prefilled = stored
        elif self.state is State.COMMITTING:
            self.forwards += not span.fresh
        if stored == self.block_start:
            self.state = State.DENOISING
        if span.fresh:
            self._count_step(span, tokens)
        self._place(span, tokens)
        if self.state is State.DENOISING and self._settled() and not self._masked(self.answer_start, self.block_end):
            self._open_block(self.block_end)
            self.state = State.COMMITTING

    def _stored(self) -> int:
        """Where the positions begin whose keys and values are not stored for good."""
        if self.state is State.PREFILLING:
            return self.prefilled
        return self.block_start - (self.plan.block_length if self.state is State.COMMITTING else 0)

    def _context_end(self, budget: int) -> int:
        """Where the finished text ends that this forward computes: prefill is cut between blocks, at least one goes."""
        if self.state is not State.PREFILLING:
            return self.block_start
        start = self.prefilled
        end = min(self.block_start, self._border(start + budget))
        if self.fused and end == self.block_start:
            end = min(end, self._border(start + budget - self._length))
        return max(end, min(self.block_start, self._next_border(start)))

    def _block_comes_along(self, start: int, end: int, budget: int) -> bool:
        """Is the block denoised in the forward of the finished text start … end?"""
        if start == end:
            return True
        if end < self.block_start or not self.fused:
            return False
        # What a row decides must not hang on the budget: no commit stands alone, and no slot that is read here.
        if self.state is State.COMMITTING or self._opens:
            return True
        return end - start + self._length <= budget

    @property
    def _length(self) -> int:
        """Positions of the block that is denoised."""
        return self._block_end - self.block_start

    def _border(self, position: int) -> int:
        """The last border between blocks up to `position`."""
        return max(0, position - (position - self._origin) % self.plan.block_length)

    def _next_border(self, position: int) -> int:
        """The first border behind `position`."""
        return position + self.plan.block_length - (position - self._origin) % self.plan.block_length

    @property
    def _opens(self) -> bool:
        """Is the block's first slot read at the end of the block before it?"""
        return self.spec.shift and self.block_start >= self.prompt_length

    def _wanted(self, start: int, end: int, stop: int) -> list[Target]:
        targets = []
        if self._opens and start < end == self.block_start:
            targets.append(Target(end - 1 - start, end, certain=True))
        if stop > end:
            first = self.answer_start + self._opens
            targets += self._targets(first, min(stop, self.limit), read_from=start + self.spec.shift)
        return targets

    def _block_steps(self, start: int) -> int:
        """In proportion to the block's part of the answer, which may be small in the first and in the last block."""
        begin, end = max(start, self.prompt_length), min(start + self.plan.block_length, self.limit)
        return max(1, self._steps_until(end) - self._steps_until(begin))

    def _steps_until(self, position: int) -> int:
        return -(-self.plan.denoise_steps * (position - self.prompt_length) // self.plan.max_new_tokens)

    def _visible(self, start: int, stop: int) -> list[int]:
        seen: list[int] = []
        while start < stop:
            end = min(stop, self._next_border(start))
            seen += [end] * (end - start)
            start = end
        return seen

    def _open_block(self, start: int) -> None:
        whole, within = start + self.plan.block_length, min(start + self.plan.block_length, self.limit)
        self._block_end = within if self.spec.last_block == "cut" else whole
        self.canvas += [self.spec.mask_id] * (self._block_end - len(self.canvas))
        opened = self.spec.shift and start >= self.prompt_length and not self.fused  # by the forward before
        self._begin_block(start, within - max(start, self.prompt_length) - opened)
