"""The engine's tokens are those of the plain sampler, whatever runs beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import checkpoints
from tests.engine.reference import Answer, Recipe, Reference, masked, worth_comparing
from tests.engine.running import prompt, request, run
from worker.engine import Engine, Loaded
from worker.engine.models.decoder import Attend
from worker.engine.models.decoders import AnyDecoder
from worker.engine.sequence import Row, State

LENGTHS = (1, 5, 40, 140)  # the last one outgrows the smallest cache slot
RULES = (
    ("fixed_steps", 7),
    ("fixed_steps", 14),  # three steps for a block of three masks and an opened slot
    ("fixed_steps", 30),
    ("threshold", 0.9),
    ("threshold", 0.6),
    ("left_to_right", 0.9),
    ("left_to_right", 0.5),
    ("entropy_bound", 0.1),
    ("entropy_bound", 2.0),
    ("entropy_threshold", 0.4),
    ("entropy_threshold", 2.0),
    ("factor", 1.0),
    ("factor", 2.5),
    ("klass", (0.9, 0.01)),
    ("klass", (0.3, 2.0)),
    ("joint_threshold", (0.5, 0.9)),
    ("joint_threshold", (0.2, 0.3)),
)
NAMES = {
    "fixed_steps": ("denoise_steps",),
    "entropy_bound": ("entropy_bound",),
    "entropy_threshold": ("entropy_threshold",),
    "factor": ("factor",),
    "klass": ("threshold", "kl_threshold"),
    "joint_threshold": ("threshold", "edit_threshold"),
}


@pytest.fixture(scope="module")
def causal_reference() -> Reference:
    return Reference(tied=True)


@pytest.fixture(scope="module")
def block_reference() -> Reference:
    return Reference(tied=False, shape=checkpoints.QWEN3)


@pytest.fixture(scope="module")
def shifted_reference() -> Reference:
    return Reference(tied=False, shape=checkpoints.QWEN2_CALM)


@pytest.fixture(scope="module")
def bidirectional_reference() -> Reference:
    return Reference(tied=False)


@pytest.mark.parametrize("block_length", [1, 4, 6])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_causal_context_gives_the_reference_tokens(
    causal: Loaded, causal_reference: Reference, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: causal_reference.causal_answer(prompt(n, n), recipe) for n in LENGTHS}
    assert engine_answers(causal, recipe) == expected


@pytest.mark.parametrize("block_length", [1, 4, 6])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_a_commit_fused_with_the_next_step_gives_the_reference_tokens(
    causal: Loaded, causal_reference: Reference, rule: str, number: float, block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: causal_reference.fused_answer(prompt(n, n), recipe) for n in LENGTHS}
    assert engine_answers(causal, recipe, commit="fused") == expected


@pytest.mark.parametrize("block_length", [1, 4, 20])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_block_causal_gives_the_reference_tokens(
    block_causal: Loaded,
    block_reference: Reference,
    rule: str,
    number: float | tuple[float, float],
    block_length: int,
) -> None:
    """Prompts of 40 and 140 end with a block of 4 and of 20, the others within one. Both commits give the same."""
    recipe = recipe_of(rule, number, block_length)
    expected = {n: block_reference.block_answer(prompt(n, n), recipe) for n in LENGTHS}
    assert engine_answers(block_causal, recipe, commit="separate") == expected
    assert engine_answers(block_causal, recipe, commit="fused") == expected


@pytest.mark.parametrize("commit", ["separate", "fused"])
@pytest.mark.parametrize("block_length", [1, 5])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_shifted_blocks_give_the_reference_tokens(
    shifted: Loaded,
    shifted_reference: Reference,
    rule: str,
    number: float | tuple[float, float],
    block_length: int,
    commit: str,
) -> None:
    recipe = recipe_of(rule, number, block_length)
    answer = shifted_reference.block_answer
    expected = {n: answer(prompt(n, n), recipe, shift=1, fused=commit == "fused") for n in LENGTHS}
    assert engine_answers(shifted, recipe, commit=commit) == expected


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("rule", "number"), RULES[::2])
def test_a_cache_refreshed_at_every_other_block_gives_the_reference_tokens(
    bidirectional: Loaded, bidirectional_reference: Reference, rule: str, number: float, cache: str
) -> None:
    recipe = recipe_of(rule, number, 5)
    answer = bidirectional_reference.bidirectional_answer
    expected = {n: answer(prompt(n, n), recipe, cache, refresh=2) for n in LENGTHS}
    assert engine_answers(bidirectional, recipe, cache=cache, cache_refresh=2) == expected


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("block_length", [5, 32])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_bidirectional_gives_the_reference_tokens(
    bidirectional: Loaded,
    bidirectional_reference: Reference,
    rule: str,
    number: float | tuple[float, float],
    block_length: int,
    cache: str,
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: bidirectional_reference.bidirectional_answer(prompt(n, n), recipe, cache) for n in LENGTHS}
    assert engine_answers(bidirectional, recipe, cache=cache) == expected


@pytest.mark.parametrize("kind", ["causal", "block", "shifted"])
def test_the_references_are_worth_comparing_with(
    causal_reference: Reference, block_reference: Reference, shifted_reference: Reference, kind: str
) -> None:
    """Random weights could collapse onto one token, or never stop; then equality would prove little."""
    recipe = Recipe(max_new_tokens=32, block_length=4, rule="threshold", number=0.9)
    answer = {
        "causal": causal_reference.causal_answer,
        "block": block_reference.block_answer,
        "shifted": partial(shifted_reference.block_answer, shift=1),
    }[kind]
    worth_comparing([answer(prompt(n, 6), recipe) for n in range(20)])


def test_klass_is_worth_comparing_with(bidirectional_reference: Reference) -> None:
    """Neither does every step take one position, nor does the bound of the KL make no difference."""
    steps = {
        bound: bidirectional_reference.bidirectional_answer(
            prompt(9, 9), Recipe(max_new_tokens=22, block_length=32, rule="klass", number=0.3, bound=bound), "none"
        ).steps
        for bound in (0.01, 2.0, 1e9)
    }
    assert steps[0.01] > steps[2.0] > steps[1e9]


def test_joint_threshold_is_worth_comparing_with(bidirectional_reference: Reference) -> None:
    """Edits are made, and come to rest by themselves where they need much confidence."""

    def answer(number: float, bound: float) -> Answer:
        recipe = Recipe(max_new_tokens=22, block_length=8, rule="joint_threshold", number=number, bound=bound)
        return bidirectional_reference.bidirectional_answer(prompt(5, 5), recipe, "none")

    never, seldom, restless = answer(0.5, 1.0), answer(0.5, 0.9), answer(0.2, 0.3)
    assert never.tokens != seldom.tokens
    assert seldom.steps < 16 <= restless.steps


def test_a_frozen_prefix_is_an_approximation(bidirectional_reference: Reference) -> None:
    """Otherwise the prefix cache would be compared with what it is not."""
    recipe = Recipe(max_new_tokens=22, block_length=8, rule="left_to_right", number=0.9)
    answer = bidirectional_reference.bidirectional_answer
    assert answer(prompt(9, 9), recipe, "prefix") != answer(prompt(9, 9), recipe, "none")


def test_causal_logits_agree_on_mixed_lengths(causal: Loaded, causal_reference: Reference) -> None:
    engine, logits = recording(causal)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=8, rule="left_to_right", threshold=1.0))
    engine.step()
    expected = torch.stack([causal_reference.causal_logits(list(prompt(n, n)), n)[-1] for n in LENGTHS])
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=0)
    slots = [opening(row) for row in expected]
    engine.step()
    canvases = [[*prompt(n, n), slot, *[checkpoints.MASK] * 3] for n, slot in zip(LENGTHS, slots, strict=True)]
    wanted = [
        causal_reference.causal_logits(canvas, n)[n : n + 3]
        for n, canvas, slot in zip(LENGTHS, canvases, slots, strict=True)
        if slot != checkpoints.STOP
    ]
    torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("commit", ["separate", "fused"])
@pytest.mark.parametrize("kind", ["block_causal", "shifted"])
def test_block_causal_logits_agree_on_mixed_lengths(
    block_causal: Loaded, shifted: Loaded, kind: str, commit: str
) -> None:
    """In every forward of every block: with the prompt, with a commit, and alone."""
    loaded = shifted if kind == "shifted" else block_causal
    reference = (
        Reference(tied=False, shape=checkpoints.QWEN2_CALM)
        if loaded.spec.shift
        else Reference(tied=False, shape=checkpoints.QWEN3)
    )
    engine, logits = recording(loaded)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=10, block_length=4, commit=commit))
    while engine.active():
        rows = [*engine.scheduler.running, *engine.scheduler.waiting]
        rows.sort(key=lambda row: row.state is State.PREFILLING)  # as they are scheduled
        wanted = [torch.empty(0, checkpoints.VOCABULARY)]
        for row in rows:
            read = torch.tensor(asked(row), dtype=torch.int64) - int(loaded.spec.shift)
            wanted.append(reference.block_logits(row.canvas, 4)[read])
        engine.step()
        torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


def asked(row: Row) -> list[int]:
    """Positions that a row's next forward predicts: the block's masks where it is part of it, else its first slot."""
    if row.plan.commit == "fused" or row.state is State.DENOISING:
        return masked(row.canvas, row.answer_start, row.limit)
    return [row.block_start] if row.spec.shift and row.block_start >= row.prompt_length else []


def test_bidirectional_logits_agree_on_mixed_lengths(bidirectional: Loaded, bidirectional_reference: Reference) -> None:
    engine, logits = recording(bidirectional)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=n % 7 + 4, block_length=4))
    engine.step()
    wanted = []
    for n in LENGTHS:
        canvas = [*prompt(n, n), *[checkpoints.MASK] * (n % 7 + 4)]
        wanted.append(bidirectional_reference.full_logits(canvas)[n : n + 4])
    torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


class RecordingDecoder:
    """A decoder that remembers the logits of every position that was asked for."""

    def __init__(self, decoder: AnyDecoder) -> None:
        self._decoder = decoder
        self.config, self.head, self.device, self.dtype = decoder.config, decoder.head, decoder.device, decoder.dtype
        self.logits: list[Tensor] = []

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        out = self._decoder.hidden(tokens, positions, attend, wanted)
        self.logits.append(self.head(out))
        return out


def recording(loaded: Loaded) -> tuple[Engine, list[Tensor]]:
    decoder = RecordingDecoder(loaded.decoder)
    return Engine(loaded.spec, decoder), decoder.logits


def opening(logits: Tensor) -> int:
    allowed = logits.clone()
    allowed[checkpoints.MASK] = -torch.inf
    return int(allowed.argmax())


def recipe_of(rule: str, number: float | tuple[float, float], block_length: int) -> Recipe:
    first, bound = number if isinstance(number, tuple) else (number, 0.0)
    return Recipe(max_new_tokens=22, block_length=block_length, rule=rule, number=first, bound=bound)


def engine_answers(loaded: Loaded, recipe: Recipe, **params: Any) -> dict[int, Answer]:
    """All lengths together through the engine."""
    params = {
        **dict(zip(NAMES.get(recipe.rule, ("threshold",)), (recipe.number, recipe.bound), strict=False)),
        "rule": recipe.rule,
        "max_new_tokens": recipe.max_new_tokens,
        "block_length": recipe.block_length,
        **params,
    }
    finished = run(loaded, [request(n, prompt(n, n), **params) for n in LENGTHS])
    return {n: Answer(one.token_ids, one.steps) for n, one in finished.items()}
