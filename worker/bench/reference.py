"""The research sampler, plainly: no cache, one prompt at a time, as many steps as there are tokens to find.

Each step computes the whole canvas (prompt and all answer positions) with logits at every position, and places the
surest token of the leftmost block that still holds a mask: `generate` of LLaDA (Nie et al., 2025), with softmax in
float32 instead of float64. Models with a causal context see finished text causally and the active block whole,
block-causal ones whole blocks up to their own; where a block's first slot is read before the block, it is found first.
Causal models see all that is known and the masks before their own, in blocks too, where the engine has a window.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.bench.driving import Pass
from worker.bench.prompts import spread
from worker.bench.systems import LEAST_PROMPTS, Workload
from worker.engine import Loaded, Request

TIMED_STEPS = 3


class Sampler:
    """The plain sampler over a loaded model's weights."""

    def __init__(self, loaded: Loaded) -> None:
        self._spec, self._decoder = loaded.spec, loaded.decoder

    def steps(self, prompt_ids: tuple[int, ...], max_new_tokens: int, block_length: int = 0) -> Iterator[Tensor]:
        """The canvas (P + max_new_tokens,) after each of the `max_new_tokens` steps."""
        first, block_length = len(prompt_ids), block_length or self._spec.block_length
        on_grid = self._spec.attention == "block_causal" and self._spec.grid == "text"
        grid = first % block_length if on_grid else 0  # prompt in the first block
        canvas = torch.tensor([*prompt_ids, *[self._spec.mask_id] * max_new_tokens], device=self._decoder.device)
        for number in range(max_new_tokens):
            start = first - grid + (grid + number) // block_length * block_length
            with torch.inference_mode():
                self._step(canvas, start, min(start + block_length, len(canvas)), block_length)
            yield canvas

    def answer(self, prompt_ids: tuple[int, ...], max_new_tokens: int, block_length: int = 0) -> tuple[int, ...]:
        """The tokens up to the first stop token; all steps are made, as published."""
        *_, canvas = self.steps(prompt_ids, max_new_tokens, block_length)
        tokens: list[int] = canvas[len(prompt_ids) :].tolist()
        end = next((at for at, token in enumerate(tokens) if token in self._spec.stop_ids), len(tokens))
        return tuple(tokens[:end])

    def _step(self, canvas: Tensor, start: int, end: int, block_length: int) -> None:
        masked = canvas == self._spec.mask_id
        logits = self.logits(canvas, self._visible(masked, start, end, block_length)).float()  # (T, V)
        logits[:, self._spec.mask_id] = -torch.inf
        confidence, x0 = logits.softmax(-1).max(-1)  # (T,) each
        if self._spec.shift:
            confidence, x0 = confidence.roll(1), x0.roll(1)
        elif self._spec.attention == "causal_context":
            x0[start] = x0[start - 1]
        candidates = torch.zeros_like(masked)
        candidates[start:end] = masked[start:end]
        opened = self._spec.attention == "causal_context" or (
            self._spec.attention == "block_causal" and self._spec.shift
        )
        if opened and bool(masked[start]):
            candidates[start + 1 : end] = False
        best = confidence.masked_fill(~candidates, -1.0).argmax()
        canvas[best] = x0[best]

    def logits(self, tokens: Tensor, visible: Tensor | None) -> Tensor:
        """tokens (T,), visible (T, T) true where a query sees a key, None for everywhere -> (T, V)."""
        c = self._spec.decoder
        groups = c.heads // c.kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)  # (heads, T, head_dim)
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            mask = _near(visible, len(tokens), c.window, q.device) if layer in c.local_layers else visible
            seen = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
            return seen.transpose(0, 1).reshape(-1, c.heads * c.head_dim)

        positions = torch.arange(len(tokens), device=tokens.device)
        return self._decoder.head(self._decoder.hidden(tokens, positions, attend, wanted=positions))

    def _visible(self, masked: Tensor, start: int, end: int, block_length: int) -> Tensor | None:
        if self._spec.attention == "bidirectional":
            return None
        length = len(masked)
        positions = torch.arange(length, device=self._decoder.device)
        if self._spec.attention == "block_causal":
            blocks = (positions - start % block_length) // block_length
            return blocks[:, None] >= blocks
        if self._spec.attention == "causal":
            order = positions + length * masked
            return order[:, None] >= order
        visible = torch.ones(length, length, dtype=torch.bool, device=self._decoder.device).tril()
        visible[start:end, start:end] = True
        return visible


def _near(visible: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """What a local layer's queries see of `visible`: at most `window` positions to either side."""
    places = torch.arange(length, device=device)
    near = (places[:, None] - places).abs() <= window
    return near if visible is None else visible & near


def log_likelihood(loaded: Loaded, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> float:
    """Sum of ln p(token | all before it) over the answer, under an autoregressive model."""
    if not token_ids:
        return 0.0
    tokens = torch.tensor([*prompt_ids, *token_ids], device=loaded.decoder.device)
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()
    with torch.inference_mode():
        logits = Sampler(loaded).logits(tokens, causal)[len(prompt_ids) - 1 : -1].float()  # (answer, V)
        picked = logits.log_softmax(-1).gather(-1, tokens[len(prompt_ids) :, None])
    return float(picked.sum())


class Reference:
    """The plain sampler's speed. A whole run would take hours, so a prompt's time is its step time times its steps."""

    name: ClassVar[str] = "reference"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sampler = Sampler(workload.loaded)
        self._requests: list[Request] = []

    def prepare(self) -> None:
        started = time.perf_counter()
        for request in spread(self._workload.requests):
            self._requests.append(request)
            self._step_seconds(request)
            if len(self._requests) >= LEAST_PROMPTS and time.perf_counter() - started > self._workload.budget_s:
                break

    def run(self) -> Pass:
        """Tokens are those of the engine's own answers to the same prompts."""
        seconds, tokens = 0.0, 0
        for request in self._requests:
            answer = self._workload.answers[request.id]
            seconds += self._step_seconds(request) * answer.plan.max_new_tokens
            tokens += len(answer.token_ids)
        return Pass(seconds, tokens)

    def _step_seconds(self, request: Request) -> float:
        canvas = min(request.params.max_new_tokens, self._room(request))
        steps = self._sampler.steps(request.prompt_ids, canvas)
        return statistics.median(self._timed(steps) for _ in range(min(TIMED_STEPS, canvas)))

    def _room(self, request: Request) -> int:
        return self._workload.loaded.spec.decoder.max_positions - len(request.prompt_ids)

    def _timed(self, steps: Iterator[Tensor]) -> float:
        started = time.perf_counter()
        next(steps)
        if self._workload.loaded.decoder.device.type == "cuda":
            torch.cuda.synchronize(self._workload.loaded.decoder.device)
        return time.perf_counter() - started

    def conditions(self) -> dict[str, Any]:
        return {
            "prompts": len(self._requests),
            "rows": 1,
            "subset": "spread evenly over the set, within the budget",
            "timing": f"median of {TIMED_STEPS} whole steps of each prompt, times its steps (= max_new_tokens)",
            "tokens": "of the engine's answers to the same prompts, up to their stop token",
        }
