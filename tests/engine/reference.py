"""A plain, slow sampler of every attention kind, to hold the engine against.

One prompt, no cache: every step recomputes the whole canvas through transformers' Llama, Qwen2, Qwen3 or Ministral 3
under an explicit mask, and every rule is a few lines over lists. It shares no code with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import checkpoints

CLASSES: dict[checkpoints.Shape, Any] = {
    checkpoints.LLAMA: (LlamaConfig, LlamaForCausalLM),
    checkpoints.QWEN2: (Qwen2Config, Qwen2ForCausalLM),
    checkpoints.QWEN2_CALM: (Qwen2Config, Qwen2ForCausalLM),
    checkpoints.QWEN3: (Qwen3Config, Qwen3ForCausalLM),
    checkpoints.MINISTRAL3: (Ministral3Config, Ministral3ForCausalLM),
}


@dataclass(frozen=True)
class Guess:
    """What the model says about one position of the block, and the token that stands there."""

    position: int
    token: int
    confidence: float
    entropy: float
    p: Tensor
    standing: int


@dataclass
class Diary:
    """What happened in a block so far."""

    guesses: list[list[Guess]] = field(default_factory=list)
    changed: bool = False
    only_edits: int = 0


@dataclass(frozen=True)
class Recipe:
    """How a prompt is denoised; every value is given."""

    max_new_tokens: int
    block_length: int
    rule: str
    number: float  # τ, γ, f, or the denoise steps of the whole answer
    bound: float = 0.0  # of the rules that have a second number


@dataclass(frozen=True)
class Answer:
    """Tokens before the first stop token, and the denoise steps they took."""

    tokens: tuple[int, ...]
    steps: int


def worth_comparing(answers: list[Answer], max_new_tokens: int = 32) -> None:
    """Not one token again and again, some answers that stop and some that do not, steps that take several tokens."""
    assert len({token for answer in answers for token in answer.tokens}) > 40
    assert 1 <= sum(len(answer.tokens) < max_new_tokens for answer in answers) < len(answers)
    assert any(answer.steps < len(answer.tokens) * 3 / 4 for answer in answers)


@dataclass(frozen=True)
class Snapshot:
    """Tokens whose keys and values were stored at one step, from `start` on, when the canvas had `length` positions."""

    start: int
    tokens: tuple[int, ...]
    length: int


class Reference:
    """The weights of `checkpoints` under one seed, computed by transformers. `shift`: position p is read at p - shift.

    Answers of blocks are told their shift by the caller.
    """

    def __init__(
        self,
        *,
        tied: bool,
        seed: int = 0,
        max_positions: int = 512,
        shape: checkpoints.Shape = checkpoints.LLAMA,
        shift: int = 0,
    ) -> None:
        make_config, make_model = CLASSES[shape]
        config = make_config(
            vocab_size=checkpoints.VOCABULARY,
            hidden_size=checkpoints.HIDDEN,
            intermediate_size=checkpoints.INTERMEDIATE,
            num_hidden_layers=checkpoints.LAYERS,
            num_attention_heads=checkpoints.HEADS,
            num_key_value_heads=checkpoints.KV_HEADS,
            head_dim=shape.head_dim,
            rms_norm_eps=checkpoints.NORM_EPS,
            rope_parameters=checkpoints.rope_parameters(shape),
            max_position_embeddings=max_positions,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
        self._model = make_model(config).eval()
        self._model.load_state_dict(checkpoints.random_weights(seed, shape))
        self.shift = shift

    def logits(self, tokens: list[int], positions: list[int], visible: Tensor) -> Tensor:
        """(T, V) float32 for `tokens` at `positions`; `visible` (T, T) bool says which query sees which key."""
        hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([tokens]),
                position_ids=torch.tensor([positions]),
                attention_mask=hidden[None, None],
                use_cache=False,
            )
        logits: Tensor = out.logits[0]
        return logits

    def causal_logits(self, canvas: list[int], block_start: int) -> Tensor:
        """Everything before the block is causal; the block sees all of the canvas."""
        length = len(canvas)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        visible[block_start:] = True
        return self.logits(canvas, list(range(length)), visible)

    def block_logits(self, canvas: list[int], block_length: int, origin: int = 0) -> Tensor:
        """Everybody sees the blocks before its own and all of its own; whole blocks lie on a grid from `origin`."""
        blocks = torch.tensor([math.floor((position - origin) / block_length) for position in range(len(canvas))])
        return self.logits(canvas, list(range(len(canvas))), blocks[:, None] >= blocks[None, :])

    def ordered_logits(self, canvas: list[int], prompt_length: int) -> Tensor:
        """Everybody sees what is put in before it: what is known, then the masks behind the prompt."""
        masks = masked(canvas, prompt_length, len(canvas))
        order = [position for position in range(len(canvas)) if position not in masks] + masks
        visible = torch.ones(len(canvas), len(canvas), dtype=torch.bool).tril()
        logits = self.logits([canvas[position] for position in order], order, visible)
        out = torch.empty_like(logits)
        out[order] = logits
        return out

    def full_logits(self, canvas: list[int]) -> Tensor:
        """Everybody sees everybody."""
        length = len(canvas)
        return self.logits(canvas, list(range(length)), torch.ones(length, length, dtype=torch.bool))

    def frozen_logits(self, history: list[Snapshot], canvas: list[int], start: int, end: int) -> Tensor:
        """Positions start … end of the canvas, the rest as the snapshots left it; what is not computed is NaN.

        Without a cache: every snapshot and the new part are one sequence. A snapshot's positions see, of each canvas
        position, the newest copy up to their own snapshot; so does the new part.
        """
        parts = [*history, Snapshot(start, tuple(canvas[start:end]), len(canvas))]
        tokens = [token for part in parts for token in part.tokens]
        positions = [p for part in parts for p in range(part.start, part.start + len(part.tokens))]
        visible = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        newest: dict[int, int] = {}
        first = 0
        for part in parts:
            for offset in range(len(part.tokens)):
                newest[part.start + offset] = first + offset
            seen = [place for position, place in newest.items() if position < part.length]
            for offset in range(len(part.tokens)):
                visible[first + offset, seen] = True
            first += len(part.tokens)
        logits = self.logits(tokens, positions, visible)
        out = torch.full((len(canvas), logits.shape[1]), math.nan)
        out[start:end] = logits[-(end - start) :]
        return out

    def causal_answer(self, prompt: tuple[int, ...], recipe: Recipe, shift: int = 1) -> Answer:
        """Blocks after a causal context, which predicts their first slot; an answer never runs past its limit."""
        canvas, limit, steps = list(prompt), len(prompt) + recipe.max_new_tokens, 0
        while len(canvas) < limit:
            start, block = len(canvas), (len(canvas) - len(prompt)) // recipe.block_length
            opening = guess(self.causal_logits(canvas, start)[-1], start, checkpoints.MASK)
            canvas += [opening.token] + [checkpoints.MASK] * (recipe.block_length - 1)
            masks = min(limit, len(canvas)) - start - 1
            diary = Diary()
            for quota in quotas(recipe, block, masks):
                if settled(diary, recipe) and (ended(canvas, len(prompt), limit) or not masked(canvas, start, limit)):
                    break
                logits = self.causal_logits(canvas, start)
                where = candidates(canvas, start, start + 1, min(limit, len(canvas)), recipe)
                diary.guesses.append([guess(logits[p - shift], p, canvas[p]) for p in where])
                step(canvas, diary, recipe, quota)
                steps += 1
            if ended(canvas, len(prompt), limit):
                break
        return Answer(cut(canvas, len(prompt), limit), steps)

    def fused_answer(self, prompt: tuple[int, ...], recipe: Recipe, shift: int = 1) -> Answer:
        """As `causal_answer`, but the first slot is decided in the block's first step, while it is still masked."""
        canvas, limit, steps = list(prompt), len(prompt) + recipe.max_new_tokens, 0
        while len(canvas) < limit and not ended(canvas, len(prompt), limit):
            start, block = len(canvas), (len(canvas) - len(prompt)) // recipe.block_length
            opening = guess(self.causal_logits(canvas, start)[-1], start, checkpoints.MASK)
            opening = replace(opening, confidence=1.0, entropy=0.0)  # taken at once
            canvas += [checkpoints.MASK] * recipe.block_length
            diary = Diary()
            for quota in quotas(recipe, block, min(limit, len(canvas)) - start):
                if settled(diary, recipe) and (ended(canvas, len(prompt), limit) or not masked(canvas, start, limit)):
                    break
                logits = self.causal_logits(canvas, start)
                # The first slot is read from the context, which never sees the block.
                first = start if canvas[start] == checkpoints.MASK else start + 1
                where = candidates(canvas, start, first, min(limit, len(canvas)), recipe)
                diary.guesses.append([guess(logits[p - shift], p, canvas[p]) if p > start else opening for p in where])
                step(canvas, diary, recipe, quota)
                steps += 1
        return Answer(cut(canvas, len(prompt), limit), steps)

    def block_answer(
        self,
        prompt: tuple[int, ...],
        recipe: Recipe,
        shift: int = 0,
        fused: bool = False,
        grid: str = "text",
        last_block: str = "whole",
    ) -> Answer:
        """Blocks on a grid from position 0: the prompt's end, where it ends within a block, begins the first one.

        Shifted, a whole block's first slot is read at the end of the block before; `fused`: in its first step.
        `grid: answer`: the first block is the prompt's, and as long as lets another one begin with the answer.
        `last_block: cut`: it ends with the answer.
        """
        canvas, limit, steps = list(prompt), len(prompt) + recipe.max_new_tokens, 0
        rest = len(prompt) % recipe.block_length
        origin, first_start = (rest, len(prompt)) if grid == "answer" else (0, len(prompt) - rest)
        for block, start in enumerate(range(first_start, limit, recipe.block_length)):
            canvas += [checkpoints.MASK] * (start + recipe.block_length - len(canvas))
            if last_block == "cut":
                del canvas[limit:]
            begin, end = max(start, len(prompt)), min(limit, len(canvas))
            masks, opening = end - begin, None
            if shift and begin == start:
                before = self.block_logits(canvas, recipe.block_length, origin)[start - 1]
                opening = guess(before, start, checkpoints.MASK)
                opening = replace(opening, confidence=1.0, entropy=0.0)  # taken at once
                if not fused:
                    canvas[start], masks = opening.token, masks - 1
            diary = Diary()
            part = [math.ceil(recipe.number * (p - len(prompt)) / recipe.max_new_tokens) for p in (begin, end)]
            for quota in quotas(recipe, block, masks, share=part[1] - part[0]):
                if settled(diary, recipe) and (ended(canvas, len(prompt), limit) or not masked(canvas, begin, end)):
                    break
                logits = self.block_logits(canvas, recipe.block_length, origin)
                first = begin + 1 if opening and canvas[start] != checkpoints.MASK else begin
                where = candidates(canvas, begin, first, end, recipe)
                guesses = [guess(logits[p - shift], p, canvas[p]) for p in where]
                diary.guesses.append([opening if opening and one.position == start else one for one in guesses])
                step(canvas, diary, recipe, quota)
                steps += 1
            if ended(canvas, len(prompt), limit):
                break
        return Answer(cut(canvas, len(prompt), limit), steps)

    def ordered_answer(self, prompt: tuple[int, ...], recipe: Recipe) -> Answer:
        """A window of `block_length` positions, what is known of it put in before its masks.

        It begins behind what was known without a gap when the last step began, and reaches one length further while
        it holds no mask.
        """
        canvas, start, limit, steps = list(prompt), len(prompt), len(prompt) + recipe.max_new_tokens, 0
        diary = Diary()
        while not ended(canvas, len(prompt), limit) and (len(canvas) < limit or masked(canvas, start, limit)):
            end = min(limit, start + recipe.block_length)
            if len(canvas) >= end and not masked(canvas, start, end):
                end = min(limit, end + recipe.block_length)
            canvas += [checkpoints.MASK] * (end - len(canvas))
            logits = self.ordered_logits(canvas, len(prompt))
            where = masked(canvas, start, end)
            diary.guesses.append([guess(logits[p], p, checkpoints.MASK) for p in where])
            even = int(recipe.number)
            quota = recipe.max_new_tokens // even + (steps < recipe.max_new_tokens % even) if even else 0
            step(canvas, diary, recipe, quota)
            steps += 1
            start = where[0]
        return Answer(cut(canvas, len(prompt), limit), steps)

    def bidirectional_answer(self, prompt: tuple[int, ...], recipe: Recipe, cache: str, refresh: int = 1) -> Answer:
        """The answer stands there in masks from the start; blocks are denoised from left to right."""
        limit, steps = len(prompt) + recipe.max_new_tokens, 0
        canvas = list(prompt) + [checkpoints.MASK] * recipe.max_new_tokens
        history: list[Snapshot] = []
        for block, start in enumerate(range(len(prompt), limit, recipe.block_length)):
            end = min(limit, start + recipe.block_length)
            diary = Diary()
            for number, quota in enumerate(quotas(recipe, block, end - start)):
                if settled(diary, recipe) and (ended(canvas, len(prompt), limit) or not masked(canvas, start, end)):
                    break
                stop = min(end, len(canvas)) if cache == "dual" else len(canvas)
                if cache == "none" or (number == 0 and block % refresh == 0):
                    logits, history = self.full_logits(canvas), []
                    first, stop = 0, len(canvas)
                else:
                    first = start - (recipe.block_length if number == 0 else self.shift)
                    logits = self.frozen_logits(history, canvas, first, stop)
                history.append(Snapshot(first, tuple(canvas[first:stop]), len(canvas)))
                where = candidates(canvas, start, start, min(end, len(canvas)), recipe)
                diary.guesses.append([guess(logits[p - self.shift], p, canvas[p]) for p in where])
                step(canvas, diary, recipe, quota)
                steps += 1
                if cache != "none" and recipe.rule != "joint_threshold" and checkpoints.STOP in canvas[start:end]:
                    del canvas[canvas.index(checkpoints.STOP, start) + 1 :]
            if ended(canvas, len(prompt), limit):
                break
        return Answer(cut(canvas, len(prompt), limit), steps)


def guess(logits: Tensor, position: int, standing: int) -> Guess:
    """The best token that is not the mask, its probability, and the entropy, in float64."""
    allowed = logits.double()
    allowed[checkpoints.MASK] = -torch.inf
    p = allowed.softmax(-1)
    token = int(p.argmax())
    entropy = -sum(x * math.log(x) for x in p.tolist() if x > 0)
    return Guess(position, token, float(p[token]), entropy, p, standing)


def quotas(recipe: Recipe, block: int, masks: int, share: int | None = None) -> Iterator[int]:
    """Positions to accept in each step of a block: its share of the steps, the masks spread over them; then one each.

    Rules without a quota get zeros. `share`: the block's steps, where blocks do not begin with the answer.
    """
    if recipe.rule == "fixed_steps":
        blocks = math.ceil(recipe.max_new_tokens / recipe.block_length)
        even = int(recipe.number) // blocks + (1 if block < int(recipe.number) % blocks else 0)
        share = even if share is None else share
        steps = max(1, share)
        for number in range(steps):
            yield masks // steps + (1 if number < masks % steps else 0)
    while True:
        yield 0


def candidates(canvas: list[int], start: int, first: int, end: int, recipe: Recipe) -> list[int]:
    """Positions to guess of the block that begins at `start`: masks, and for the rule that edits all from `first`.

    What stands behind a stop token that ends the answer is of no interest.
    """
    if recipe.rule != "joint_threshold":
        return masked(canvas, first, end)
    if checkpoints.STOP in canvas[start:end]:
        stop = canvas.index(checkpoints.STOP, start)
        if checkpoints.MASK not in canvas[start:stop]:
            return list(range(first, stop + 1))
    return list(range(first, end))


def settled(diary: Diary, recipe: Recipe) -> bool:
    """Has the rule that edits come to rest?"""
    return recipe.rule != "joint_threshold" or not diary.changed or diary.only_edits >= 16


def step(canvas: list[int], diary: Diary, recipe: Recipe, quota: int) -> None:
    """Write the guesses that the rule accepts."""
    taken = accepted(diary.guesses, recipe, quota)
    for one in taken:
        canvas[one.position] = one.token
    diary.changed = bool(taken)
    diary.only_edits += all(one.standing != checkpoints.MASK for one in diary.guesses[-1])


def accepted(past: list[list[Guess]], recipe: Recipe, quota: int) -> list[Guess]:
    guesses = past[-1]
    best_first = sorted(guesses, key=lambda one: (-one.confidence, one.position))
    if recipe.rule == "fixed_steps":
        return best_first[: max(1, quota)]
    if recipe.rule == "threshold":
        return [one for one in guesses if one.confidence >= recipe.number] or best_first[:1]
    if recipe.rule == "joint_threshold":
        open_ = [one for one in guesses if one.standing == checkpoints.MASK]
        sure = [one for one in open_ if one.confidence > recipe.number]
        best = [one for one in best_first if one.standing == checkpoints.MASK][:1]
        wrong = [one for one in guesses if one.standing not in (checkpoints.MASK, one.token)]
        return (sure or best) + [one for one in wrong if one.confidence > recipe.bound]
    if recipe.rule == "factor":
        count = max(
            (k for k in range(1, len(guesses) + 1) if best_first[k - 1].confidence >= 1 - recipe.number / (k + 1)),
            default=1,
        )
        return best_first[:count]
    if recipe.rule == "klass":
        return [
            one for one in guesses if one.confidence > recipe.number and steady(one.position, past, recipe.bound)
        ] or best_first[:1]
    if recipe.rule == "entropy_threshold":
        charged = {one.position: one.entropy + 0.02 * (one.position - guesses[0].position) for one in guesses}
        least = min(guesses, key=lambda one: charged[one.position])
        return [one for one in guesses if charged[one.position] < recipe.number] or [least]
    if recipe.rule == "left_to_right":
        taken = guesses[:1]
        for one in guesses[1:]:
            if one.confidence < recipe.number:
                break
            taken.append(one)
        return taken
    taken, total = [], 0.0
    for one in sorted(guesses, key=lambda one: (one.entropy, one.position)):
        # Sorted upwards, so the newest entropy is the largest: the sum without it is what has been taken so far.
        if total > recipe.number:
            break
        taken.append(one)
        total += one.entropy
    return taken


def steady(position: int, past: list[list[Guess]], bound: float) -> bool:
    """Has the distribution at `position` moved by less than `bound` in each of the last two steps?"""
    seen = [one.p for guesses in past[-3:] for one in guesses if one.position == position]
    return len(seen) == 3 and all(divergence(now, before) < bound for before, now in pairwise(seen))


def divergence(now: Tensor, before: Tensor) -> float:
    return sum(a * math.log(a / b) for a, b in zip(now.tolist(), before.tolist(), strict=True) if a > 0)


def masked(canvas: list[int], start: int, end: int) -> list[int]:
    return [p for p in range(start, min(end, len(canvas))) if canvas[p] == checkpoints.MASK]


def ended(canvas: list[int], prompt_length: int, limit: int) -> bool:
    """A stop token with no mask before it."""
    for token in canvas[prompt_length:limit]:
        if token == checkpoints.MASK:
            return False
        if token == checkpoints.STOP:
            return True
    return False


def cut(canvas: list[int], prompt_length: int, limit: int) -> tuple[int, ...]:
    answer = canvas[prompt_length:limit]
    return tuple(answer[: answer.index(checkpoints.STOP)] if checkpoints.STOP in answer else answer)
