"""Families that are SDAR's kind of row, with facts of their own: where the grid begins, where the last block ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import BadPrompt, ModelLoadError
from tests import checkpoints
from tests.engine.reference import Recipe, Reference, worth_comparing
from tests.engine.running import drain, engine_of, prompt, request, run
from tests.engine.test_against_reference import LENGTHS, asked, engine_answers, recipe_of, recording
from worker.engine import Loaded, load
from worker.engine.admission import admit
from worker.engine.models.decoder import shapes
from worker.engine.models.registry import model_spec
from worker.engine.models.spec import NAME
from worker.engine.prefixes import CHUNK
from worker.engine.sequence import State

CONTEXT = 512
SEED = 3  # the rounding of its logits, which reach 20, stays well below 1e-4
RULES = (
    ("fixed_steps", 14),
    ("threshold", 0.6),
    ("joint_threshold", (0.2, 0.3)),
)


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, the model of transformers that it must agree with, and how its blocks lie."""

    write: Callable[..., Path]
    reference: dict[str, Any]
    blocks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    loaded: Loaded
    reference: Reference
    blocks: dict[str, Any]


FAMILIES = {
    "dream_reasoner": Family(checkpoints.dream_reasoner, {"tied": False, "shape": checkpoints.QWEN3}),
    "stable_diffcoder": Family(checkpoints.stable_diffcoder, {"tied": False}, {"last_block": "cut"}),
    "a2d_bd3lm": Family(checkpoints.a2d_qwen3, {"tied": True, "shape": checkpoints.QWEN3}, {"grid": "answer"}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family = FAMILIES[request.param]
    folder = family.write(tmp_path_factory.mktemp(request.param), seed=SEED, tokenizer=False)
    return Pair(load(folder, device="cpu", dtype="float32"), Reference(**family.reference, seed=SEED), family.blocks)


@pytest.mark.parametrize("commit", ["separate", "fused"])
def test_logits_agree_on_mixed_lengths(pair: Pair, commit: str) -> None:
    """In every forward of every block: with the prompt, with a commit, and alone."""
    engine, logits = recording(pair.loaded)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=10, block_length=4, commit=commit))
    while engine.active():
        rows = [*engine.scheduler.running, *engine.scheduler.waiting]
        rows.sort(key=lambda row: row.state is State.PREFILLING)  # as they are scheduled
        wanted = [torch.empty(0, checkpoints.VOCABULARY)]
        for row in rows:
            origin = row.prompt_length % 4 if pair.blocks.get("grid") == "answer" else 0
            canvas = row.canvas[: row.limit] if pair.blocks.get("last_block") == "cut" else row.canvas
            wanted.append(pair.reference.block_logits(canvas, 4, origin)[asked(row)])
        engine.step()
        torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_length", [1, 6, 32])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_tokens_are_those_of_the_plain_sampler(
    pair: Pair, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    """An answer of 22 tokens ends within a block of 6 and of 32. Both commits give the same."""
    recipe = recipe_of(rule, number, block_length)
    expected = {n: pair.reference.block_answer(prompt(n, n), recipe, **pair.blocks) for n in LENGTHS}
    assert engine_answers(pair.loaded, recipe, commit="separate") == expected
    assert engine_answers(pair.loaded, recipe, commit="fused") == expected


def test_the_references_are_worth_comparing_with(pair: Pair) -> None:
    recipe = Recipe(max_new_tokens=30, block_length=4, rule="threshold", number=0.6)
    worth_comparing([pair.reference.block_answer(prompt(n, 6), recipe, **pair.blocks) for n in range(20)], 30)


@pytest.mark.parametrize("blocks", [{"grid": "answer"}, {"last_block": "cut"}])
def test_where_blocks_lie_matters(blocks: dict[str, Any]) -> None:
    """Otherwise the families would be compared with what they are not."""
    reference = Reference(tied=False, shape=checkpoints.QWEN3)
    recipe = Recipe(max_new_tokens=22, block_length=6, rule="left_to_right", number=1.0)
    plain = [reference.block_answer(prompt(n, 9), recipe) for n in range(8)]
    assert plain != [reference.block_answer(prompt(n, 9), recipe, **blocks) for n in range(8)]


def test_a_block_begins_with_the_answer(bd3lm: Loaded) -> None:
    one = admit(0, request("r", prompt(7, 7), max_new_tokens=6, block_length=4, commit="fused"), bd3lm.spec)
    first = one.span(1000)
    assert (first.start, first.prefilled, first.fresh) == (0, 7, 4)
    assert first.visible == [3] * 3 + [7] * 4 + [11] * 4
    assert [target.position for target in first.targets] == [7, 8, 9, 10]
    assert one.most_positions == 15


@pytest.mark.parametrize(("budget", "lengths"), [(1, [3, 4, 4]), (4, [3, 4, 4]), (7, [7, 4]), (10, [7, 8]), (15, [15])])
def test_prefill_is_cut_between_blocks_of_that_grid(bd3lm: Loaded, budget: int, lengths: list[int]) -> None:
    one = admit(0, request("r", prompt(11, 11), max_new_tokens=6, block_length=4, commit="fused"), bd3lm.spec)
    found = []
    while one.state is State.PREFILLING:
        span = one.span(budget)
        found.append(len(span.tokens))
        one.receive(span, [10 + number for number in range(len(span.targets))])
    assert found == lengths


@pytest.mark.parametrize(("length", "room"), [(CONTEXT - 4, 4), (CONTEXT - 5, 4), (CONTEXT - 9, 8)])
def test_an_answer_of_whole_blocks_ends_within_the_context(bd3lm: Loaded, length: int, room: int) -> None:
    one = request("r", prompt(1, length), max_new_tokens=100, block_length=4)
    finished = run(bd3lm, [one])["r"]
    assert finished.plan.max_new_tokens == room
    with pytest.raises(BadPrompt, match=f"longest prompt: {CONTEXT - 4} tokens"):
        admit(0, request("r", prompt(1, CONTEXT - 3), block_length=4), bd3lm.spec)


def test_beginnings_are_shared_where_the_grid_begins_with_the_text(bd3lm: Loaded) -> None:
    """Prompts of other lengths see other blocks, whose keys and values are others."""
    engine = engine_of(bd3lm)
    reused = []
    for number, more in enumerate([4, 5, 6, 8, 5, 6, 12, 5]):
        one = request(number, (*prompt(99, 3 * CHUNK), *prompt(number, more)), max_new_tokens=8, block_length=4)
        engine.add(one)
        assert drain(engine)[number].token_ids == run(bd3lm, [one], prefix_cache_mb=0)[number].token_ids
        reused.append(engine.prefixes.reused)
    assert reused == [0, 0, 0, 0, 0, 0, 3 * CHUNK, 3 * CHUNK]


@pytest.mark.parametrize("commit", ["separate", "fused"])
def test_the_last_block_ends_with_the_answer(cut: Loaded, commit: str) -> None:
    one = admit(0, request("r", prompt(6, 6), max_new_tokens=7, block_length=4, commit=commit), cut.spec)
    fresh = []
    while one.state is not State.FINISHED:
        span = one.span(1000)
        fresh.append(span.fresh)
        one.receive(span, [10 + number for number in range(len(span.targets))])
    assert [length for length in fresh if length] == [4, 4, 1]
    assert span.visible[-1] == span.end == one.limit == one.most_positions == 13
    assert len(one.finished().token_ids) == 7


def test_a_cut_block_may_end_with_the_context(cut: Loaded) -> None:
    finished = run(cut, [request("r", prompt(1, 501), max_new_tokens=100, block_length=7)])["r"]
    assert finished.plan.max_new_tokens == 11


# By shapes alone: Dream-org/DreamReasoner-8B is a Qwen3-8B, ByteDance-Seed/Stable-DiffCoder-8B-Instruct a Seed-Coder.
DREAM_REASONER: dict[str, Any] = {
    "architectures": ["DreamForCausalLM"],
    "model_type": "Dream",
    "mask_token_id": 151669,
    "block_size": 32,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 151643,
}
STABLE_DIFFCODER: dict[str, Any] = {
    "architectures": ["StableDiffcoderForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "vocab_size": 155136,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [
        (DREAM_REASONER, 399, 8_190_735_360),  # Qwen3-8B's
        (STABLE_DIFFCODER, 291, 8_250_462_208),  # published as 8.25 B
    ],
)
def test_the_real_configurations_have_the_published_totals(
    config: dict[str, Any], tensors: int, parameters: int
) -> None:
    spec = model_spec(config)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted) == tensors
    assert sum(math.prod(shape) for shape in wanted.values()) == parameters


def test_dream_reasoner_is_not_dream() -> None:
    """Which has the same `model_type`."""
    spec = model_spec(DREAM_REASONER)
    assert (spec.attention, spec.shift, spec.mask_id, spec.block_length) == ("block_causal", False, 151669, 32)
    assert spec.stop_ids == {151643, 151645}
    assert model_spec(DREAM_REASONER | {"block_size": 8}).block_length == 8
    with pytest.raises(ModelLoadError, match="attention_bias"):
        model_spec(DREAM_REASONER | {"attention_bias": True})


@pytest.mark.parametrize("architecture", ["StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"])
def test_stable_diffcoder_is_not_a_llama(architecture: str) -> None:
    spec = model_spec(STABLE_DIFFCODER | {"architectures": [architecture]})
    assert (spec.attention, spec.shift, spec.mask_id, spec.block_length) == ("block_causal", False, 5, 4)
    assert (spec.stop_ids, spec.last_block) == ({2}, "cut")


@pytest.mark.parametrize(
    ("name", "attention", "grid"),
    [
        ("Qwen3-0.6B-diffusion-bd3lm-v0.1", "block_causal", "answer"),
        ("Qwen3-0.6B-diffusion-mdlm-v0.1", "bidirectional", "text"),
        ("", "bidirectional", "text"),
    ],
)
def test_a2ds_variant_is_told_by_its_name(tmp_path: Path, name: str, attention: str, grid: str) -> None:
    folder = checkpoints.a2d_qwen3(tmp_path / name, tokenizer=False)
    spec = load(folder, "cpu", "float32").spec
    assert (spec.attention, spec.grid, spec.block_length, spec.shift) == (attention, grid, 32, False)
    assert spec.template_values == {"enable_thinking": False}
    assert NAME not in (folder / "config.json").read_text()
