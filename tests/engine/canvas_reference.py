"""A plain sampler for models that denoise random tokens: one row, transformers' model, cache, and parts of a sampler.

The loop is written from transformers' description of `generate`, with two changes that make answers comparable: random
numbers are the engine's hash of (seed, draw, position), and the answer is cut at the first stop token or the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

from worker.engine.sampling import uniform


@dataclass(frozen=True)
class Recipe:
    """What steers the sampler."""

    stop_ids: frozenset[int]
    max_new_tokens: int
    seed: int
    steps: int = 12
    hottest: float = 0.8
    coldest: float = 0.4
    bound: float = 2.0
    stable: int = 1
    sure: float = 0.1


@dataclass(frozen=True)
class Answer:
    """Tokens, and the steps that each canvas took."""

    tokens: tuple[int, ...]
    steps: list[int]


class Reference:
    """transformers' model, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32).eval()

    def stored(self, tokens: list[int]) -> tuple[DynamicCache, Tensor]:
        """The cache after all of `tokens` in one causal forward, and the hidden states (T, d)."""
        cache = DynamicCache(config=self.model.config.text_config)
        return cache, self._store(cache, tokens, 0)

    def logits(self, cache: DynamicCache, canvas: Tensor, before: Tensor | None) -> Tensor:
        """canvas (C,) and the tempered logits of the step before (C, V) -> (C, V)."""
        with torch.inference_mode():
            conditioning = None if before is None else before.unsqueeze(0)
            out = self.model(decoder_input_ids=canvas[None], cache=cache, self_conditioning_logits=conditioning)
        return out.logits[0]

    def answer(self, prompt: tuple[int, ...], recipe: Recipe) -> Answer:
        cache, _ = self.stored(list(prompt))
        text: list[int] = []
        steps: list[int] = []
        while True:
            canvas, taken = self._canvas(cache, len(prompt) + len(text), recipe)
            text += canvas
            steps.append(taken)
            if len(text) >= recipe.max_new_tokens or recipe.stop_ids & set(canvas):
                break
            self._store(cache, canvas, len(prompt) + len(text) - len(canvas))
        text = text[: recipe.max_new_tokens]
        end = next((at for at, token in enumerate(text) if token in recipe.stop_ids), len(text))
        return Answer(tuple(text[:end]), steps)

    def _store(self, cache: DynamicCache, tokens: list[int], start: int) -> Tensor:
        with torch.inference_mode():
            ids, positions = torch.tensor([tokens]), torch.arange(start, start + len(tokens))[None]
            out = self.model.model.encoder.language_model(input_ids=ids, position_ids=positions, cache=cache)
        return out.last_hidden_state[0]

    def _canvas(self, cache: DynamicCache, start: int, recipe: Recipe) -> tuple[list[int], int]:
        vocabulary, length = self.model.config.text_config.vocab_size, self.model.config.canvas_length
        heat = LinearTemperatureScheduleLogitsProcessor(recipe.coldest, recipe.hottest, recipe.steps)
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(recipe.bound), length, vocabulary, recipe.steps)
        stop = StableAndConfidentStoppingCriteria(recipe.stable, recipe.sure)

        def chance(draw: int, at: int) -> float:
            return float(uniform(*(torch.tensor([number]) for number in (recipe.seed, draw, start + at))))

        def noise(draw: int) -> Tensor:
            return torch.tensor([int(chance(draw, at) * vocabulary) for at in range(length)])

        canvas, logits = noise(0), None
        for step in range(1, recipe.steps + 1):
            left = recipe.steps + 1 - step
            logits = heat(canvas, self.logits(cache, canvas, logits), left)
            best, p = logits.argmax(-1), logits.softmax(-1)
            proposal = torch.tensor([drawn(p[at], chance(2 * step - 1, at)) for at in range(length)])
            taken = sampler.accept_canvas(canvas[None], proposal[None], logits[None], left)[0]
            canvas = torch.where(sampler.accepted_token_mask[0], taken, noise(2 * step))
            if stop(best[None], logits[None]):
                break
        return best.tolist(), step


def drawn(p: Tensor, chance: float) -> int:
    """The first token whose cumulative probability exceeds `chance` of the whole."""
    cumulative = p.cumsum(-1)
    return int((cumulative > chance * cumulative[-1]).nonzero()[0])
