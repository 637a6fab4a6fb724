"""Rows of models that stay causal and denoise by the order of their input: WeDLM's kind."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import ClassVar

from worker.engine.request import Span, Target
from worker.engine.sequence import Row, State
from worker.engine.unmasking.fixed_steps import quota


class CausalRow(Row):
    """Every token sees what was put in before it. Masks are put in last, so that they see all that is known.

    Behind the finished text stands a window of `block_length` positions. A step puts in what is known of it, then its
    masks, each part from left to right and every token under its own position; keys are stored in the order of input.
    What is known up to the window's first mask comes in its place and has seen the text before it and nothing else: it
    is finished, and the window moves behind it. What else the step stored is overwritten by the next one.

    A window without a mask is joined by the next one, whose first step so finishes it. Predictions are not shifted.
    """

    KIND: ClassVar[str] = "causal"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.entered = False
        self._move(self.prompt_length)

    def next_length(self) -> int:
        return len(self.canvas) - self.block_start

    def span(self, budget: int) -> Span:
        if self.state is State.PREFILLING:
            return self._prefill(budget)
        start, end = self.block_start, len(self.canvas)
        masks = self._masked(start, end)
        order = [position for position in range(start, end) if self.canvas[position] != self.spec.mask_id] + masks
        first = len(order) - len(masks)
        return Span(
            start,
            [self.canvas[position] for position in order],
            list(range(start + 1, end + 1)),
            [Target(first + number, position) for number, position in enumerate(masks)],
            needed=len(order),
            committed=masks[0] - start,
            fresh=end - masks[0],
            order=order,
        )

    def receive(self, span: Span, tokens: Items[int | None]) -> None:
        if self.state is State.PREFILLING:
            self.prefilled = span.end - span.fresh
            if self.prefilled == self.prompt_length:
                self.state = State.DENOISING
        if span.fresh:
            self._count_step(span, tokens)
        self._place(span, tokens)
        if self.state is State.DENOISING:
            self._move(self.block_start + span.committed)

    def _quota(self) -> int:
        """The window knows no blocks: the answer's positions are spread evenly over its steps."""
        return quota(self.plan.max_new_tokens, self.plan.denoise_steps, self.steps)

    def _prefill(self, budget: int) -> Span:
        """The window's first step comes along where it fits: it is the same one step later."""
        start, end = self.prefilled, min(self.prompt_length, self.prefilled + budget)
        stop = len(self.canvas) if end == self.prompt_length and len(self.canvas) - start <= budget else end
        targets = [Target(position - start, position) for position in range(self.prompt_length, stop)]
        visible = list(range(start + 1, stop + 1))
        return Span(start, self.canvas[start:stop], visible, targets, stop - start, fresh=stop - end)

    def _move(self, start: int) -> None:
        """Let the window begin at `start`."""
        self.block_start = start
        self._reach(self.block_end)
        if not self._masked(start, len(self.canvas)):
            self._reach(self.block_end + self.plan.block_length)

    def _reach(self, end: int) -> None:
        self.canvas += [self.spec.mask_id] * (min(end, self.limit) - len(self.canvas))
