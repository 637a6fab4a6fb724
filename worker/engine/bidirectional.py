"""Rows of models whose positions all see the whole canvas: LLaDA's kind."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import ClassVar

from worker.engine.request import Span
from worker.engine.sequence import Row, State


class BidirectionalRow(Row):
    """Every position sees the whole canvas, which stands there in masks from the start; blocks go left to right.

    cache `none`: each step computes the whole canvas (exact). With a cache a block's first step does so and stores
    keys and values; its later steps compute from the block on (`prefix`) or the block alone (`dual`) and see the rest
    as it was stored. With `cache_refresh` n only every n-th block computes the whole canvas; the others begin with
    the block before them, whose last tokens came after its keys and values. With a cache the canvas ends at the first
    stop token that was decided.

    Where the model is shifted, position p is read at p - 1. What is computed from the block on then begins one position
    earlier, so that the block's first slot too is read from a position of the same step (and of the newest block),
    never from one remembered. A prompt has at least one token: there is always a position before the block.
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
        targets = self._targets(self.block_start, self._block_limit(), read_from=start + self.spec.shift)
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
        start = self.block_start - (self.plan.block_length if self._block_step == 0 else self.spec.shift)
        return start, self._block_limit() if self.plan.cache == "dual" else len(self.canvas)

    def _block_limit(self) -> int:
        return min(self.block_end, len(self.canvas))

    def _open_block(self, start: int) -> None:
        self._begin_block(start, min(self.limit - start, self.plan.block_length))
