"""Rows of models with a causal context and a bidirectional block: the demo model's kind."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import ClassVar

from worker.engine.request import Span, Target
from worker.engine.sequence import Row, State
from worker.engine.unmasking.fixed_steps import quota


class CausalContextRow(Row):
    """Finished text is causal and cached for good; the active block sees it and all of itself.

    Prefill and each commit also predict the next block's first slot, exactly as an autoregressive model would. With
    `commit: separate` that slot is taken at once and the block is denoised from its second slot on; with `fused` the
    same forward holds the next block too and is also its first denoise step: fewer forwards, more positions. The
    block's other slots are read at the position before, where the model is shifted, else in their own place.
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
    def final_end(self) -> int:
        return self.block_end if self.state is State.COMMITTING else self.block_start

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
        targets = self._targets(start + 1, min(end, self.limit), read_from=start + self.spec.shift)
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
        read_from = start + self.spec.shift
        targets = [opening, *(Target(position - read_from, position) for position in masked[1:])]
        return Span(start, tokens, visible, targets, masked.stop - start, committed, fresh=stop - end)

    def _open_block(self, start: int) -> None:
        self.canvas.extend([self.spec.mask_id] * self.plan.block_length)
        self._begin_block(start, self._masks_of(start))
        self.state = State.DENOISING
