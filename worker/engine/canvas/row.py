"""One prompt being answered, canvas by canvas: what of it is stored, what is being denoised, when it ends."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contract.errors import PromptError
from worker.engine.canvas.context import Context, Stretch
from worker.engine.canvas.model import CanvasModel
from worker.engine.canvas.sampling import Guess, chances, guess, noise
from worker.engine.canvas.spec import CanvasSpec
from worker.engine.request import Finished, Plan, Request


@dataclass(eq=False)
class Canvas:
    """Tokens (C,) being denoised, noise where nothing is accepted; how far they are."""

    tokens: Tensor
    soft: Tensor  # (C, d): self-conditioning
    positions: Tensor  # (C,) in the text
    seen: deque[Tensor]  # the argmax (C,) of the last steps, as many as must agree
    step: int = 0


@dataclass(eq=False)
class CanvasRow:
    """A row is `waiting` text that must be stored, then a canvas, then waiting text again, until it is done."""

    request: Request
    plan: Plan
    spec: CanvasSpec
    context: Context = field(init=False, default_factory=Context)
    waiting: list[int] = field(init=False)  # finished tokens whose keys and values are not stored yet
    canvas: Canvas | None = field(init=False, default=None)
    answer: list[int] = field(init=False, default_factory=list)
    done: bool = field(init=False, default=False)
    steps: int = field(init=False, default=0)
    forwards: int = field(init=False, default=0)  # those of canvases, denoised or stored; not the prompt's
    positions: int = field(init=False, default=0)
    error: PromptError | None = field(init=False, default=None)
    admitted_at: float = field(init=False, default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.waiting = list(self.request.prompt_ids)

    @property
    def most_positions(self) -> int:
        """Text positions that the row may come to hold: whole canvases after the prompt."""
        canvas = self.plan.block_length
        return len(self.request.prompt_ids) + -(-self.plan.max_new_tokens // canvas) * canvas

    @property
    def wanted(self) -> int:
        """Positions of the next canvas before the answer's limit; the rest only fills it."""
        return min(self.plan.block_length, self.plan.max_new_tokens - len(self.answer))

    def fits(self, budget: int) -> bool:
        """May text be stored within `budget` positions? A canvas is stored in one forward, a prompt in several."""
        return budget >= (len(self.waiting) if self.answer else 1)

    def store(self, budget: int) -> tuple[Stretch, list[int]]:
        """The next of the waiting text, at most `budget` tokens."""
        part = self.waiting[:budget]
        return Stretch(self.context, len(part), finished=True), part

    def stored(self, stretch: Stretch) -> None:
        self.waiting = self.waiting[stretch.length :]
        self.positions += stretch.length
        self.forwards += bool(self.answer)

    def open_canvas(self, model: CanvasModel) -> Canvas:
        """The canvas that is being denoised, a new one of noise when there is none."""
        if self.canvas is None:
            length = self.plan.block_length
            positions = torch.arange(self.context.length, self.context.length + length, device=model.device)
            tokens = noise(self.plan.seed, 0, positions, self.spec.decoder.vocab_size)
            self.canvas = Canvas(tokens, model.no_soft(length), positions, deque(maxlen=self.spec.stable_steps))
        return self.canvas

    def look(self, model: CanvasModel, hidden: Tensor) -> Guess:
        """The step's outcome for the open canvas from its hidden states (C, d)."""
        assert self.canvas is not None
        self.canvas.step += 1
        self.steps += 1
        self.forwards += 1
        self.positions += self.plan.block_length
        scheduled = self.spec.temperature(self.canvas.step, self.plan.denoise_steps)
        chance = chances(self.plan.seed, 2 * self.canvas.step - 1, self.canvas.positions)
        return guess(model, hidden, self.plan.temperature or scheduled, chance)

    def settled(self, seen: Guess) -> Tensor:
        """() bool on the device: is the canvas done after this guess? Call once a step."""
        assert self.canvas is not None
        if self.canvas.step == self.plan.denoise_steps:
            return torch.ones((), dtype=torch.bool, device=seen.best.device)
        before = list(self.canvas.seen)
        self.canvas.seen.append(seen.best)
        if len(before) < self.spec.stable_steps:
            return torch.zeros((), dtype=torch.bool, device=seen.best.device)
        sure = seen.entropy.mean() < self.spec.sure_entropy
        return torch.stack([sure, *((one == seen.best).all() for one in before)]).all()

    def renoise(self, seen: Guess, accepted: Tensor) -> None:
        """Take the accepted proposals (C,) bool; everything else becomes noise again, whatever stood there."""
        assert self.canvas is not None
        fresh = noise(self.plan.seed, 2 * self.canvas.step, self.canvas.positions, self.spec.decoder.vocab_size)
        self.canvas.tokens, self.canvas.soft = torch.where(accepted, seen.proposal, fresh), seen.soft

    def take(self, tokens: list[int]) -> None:
        """The canvas is done, its text is `tokens`: the answer goes on, or ends here."""
        self.canvas = None
        self.answer += tokens
        self.done = len(self.answer) >= self.plan.max_new_tokens or not self.spec.stop_ids.isdisjoint(tokens)
        if not self.done:
            self.waiting = tokens

    def fail(self, error: PromptError) -> None:
        """End the row with an error."""
        self.error, self.done = error, True

    def final(self, since: int = 0) -> list[int]:
        """The answer's tokens from the `since`-th on, of canvases that are done, up to its first stop token."""
        limit = min(self.plan.max_new_tokens, len(self.answer))
        end = next((at for at in range(since, limit) if self.answer[at] in self.spec.stop_ids), limit)
        return self.answer[since:end]

    def finished(self, tokens: int | None = None) -> Finished:
        """The row's result; call once it is done, or with how many of its final `tokens` are the answer."""
        answer = self.final() if tokens is None else self.answer[:tokens]
        return Finished(
            id=self.request.id,
            prompt_tokens=len(self.request.prompt_ids),
            token_ids=tuple(answer),
            finish_reason="stop" if len(answer) < self.plan.max_new_tokens or tokens is not None else "length",
            plan=self.plan,
            steps=self.steps,
            forwards=self.forwards,
            positions=self.positions,
            seconds=time.perf_counter() - self.admitted_at,
            error=self.error,
        )
