"""Families with experts: their published layouts load, and logits and tokens are those of independent models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.expert_reference import LLaDA2, LLaDAMoE, Qwen3Moe
from tests.engine.reference import Answer, Recipe, Reference, masked, worth_comparing
from tests.engine.running import prompt, request
from tests.engine.test_against_reference import LENGTHS, asked, engine_answers, recipe_of, recording
from tests.engine.test_mix_property import BUDGETS, Guest, bounded, hold, mixes
from worker.engine import Loaded, load
from worker.engine.models.decoder import Decoder, shapes
from worker.engine.models.experts import MixtureOfExperts
from worker.engine.models.registry import model_spec
from worker.engine.models.spec import NAME
from worker.engine.sequence import State


@dataclass(frozen=True)
class Pair:
    """A tiny checkpoint as the engine loads it, and a model that has no code in common with it."""

    loaded: Loaded
    reference: Reference

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Every way to run it: they compute the same, or what the reference computes for that cache."""
        if self.loaded.spec.attention == "bidirectional":
            return [{"cache": cache} for cache in ("none", "prefix", "dual")]
        return [{"commit": commit} for commit in ("separate", "fused")]

    def answer(self, prompt_ids: tuple[int, ...], recipe: Recipe, cache: str = "none", **_: str) -> Answer:
        if self.loaded.spec.attention == "bidirectional":
            return self.reference.bidirectional_answer(prompt_ids, recipe, cache)
        return self.reference.block_answer(prompt_ids, recipe)


FAMILIES: dict[str, tuple[Callable[..., Path], Callable[[Path], Reference]]] = {
    "sdar_moe": (checkpoints.sdar_moe, Qwen3Moe),
    "llada_moe": (checkpoints.llada_moe, LLaDAMoE),
    "llada2": (checkpoints.llada2, LLaDA2),
}
RULES = (
    ("fixed_steps", 14),
    ("threshold", 0.6),
    ("joint_threshold", (0.2, 0.3)),
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    write, reference = FAMILIES[request.param]
    folder = write(tmp_path_factory.mktemp(request.param), tokenizer=False)
    return Pair(load(folder, device="cpu", dtype="float32"), reference(folder))


def test_logits_agree_on_mixed_lengths(pair: Pair) -> None:
    """In every forward of every block: with the prompt, with a commit, and alone."""
    engine, logits = recording(pair.loaded)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=10, block_length=4))
    while engine.active():
        rows = [*engine.scheduler.running, *engine.scheduler.waiting]
        rows.sort(key=lambda row: row.state is State.PREFILLING)  # as they are scheduled
        wanted = [torch.empty(0, checkpoints.VOCABULARY)]
        for row in rows:
            if pair.loaded.spec.attention == "bidirectional":
                masks = masked(row.canvas, row.block_start, min(row.block_end, row.limit))
                wanted.append(pair.reference.full_logits(row.canvas)[masks])
            else:
                wanted.append(pair.reference.block_logits(row.canvas, 4)[asked(row)])
        engine.step()
        torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_length", [5, 32])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_tokens_are_those_of_the_plain_sampler(
    pair: Pair, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    for setting in pair.settings:
        expected = {n: pair.answer(prompt(n, n), recipe, **setting) for n in LENGTHS}
        assert engine_answers(pair.loaded, recipe, **setting) == expected


def test_the_references_are_worth_comparing_with(pair: Pair) -> None:
    recipe = Recipe(max_new_tokens=32, block_length=8, rule="threshold", number=0.6)
    worth_comparing([pair.answer(prompt(n, 6), recipe) for n in range(20)])


@settings(bounded, max_examples=15)
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix(
    pair: Pair, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(pair.loaded, mix, max_rows, max_step_tokens)


LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_softmax": False,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 157184,
}
LLADA2_MINI = LLADA2 | {
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
}
LLADA2_FLASH = LLADA2 | {
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 8192,
    "eos_token_id": 156892,
    "expert_intermediate_size": 1024,
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "moe_layer_freq": [1] * 16,
    "moe_router_enable_expert_bias": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
    "vocab_size": 157184,
}
SDAR_30B_A3B: dict[str, Any] = {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "LLaDA2.0-mini": (LLADA2_MINI, 16_255_643_392),
    "LLaDA2.0-flash": (LLADA2_FLASH, 102_889_705_216),  # its safetensors' count, the routers' biases included
    "LLaDA-MoE-7B-A1B-Instruct": (LLADA_MOE, 7_356_880_896),  # published as 14.7 GB in bfloat16
    "SDAR-30B-A3B-Chat": (SDAR_30B_A3B, 30_532_122_624),  # that of Qwen3-30B-A3B, from which it is made
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_configurations_have_the_published_totals(name: str) -> None:
    config, parameters = PUBLISHED[name]
    spec = model_spec(config)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted)
    assert sum(math.prod(shape) for shape in wanted.values()) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_configurations_can_be_built(name: str) -> None:
    spec = model_spec(PUBLISHED[name][0])
    config = replace(spec.decoder, max_positions=8, layers=2)
    wanted = shapes(config)
    decoder = Decoder(config, lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.head.shape == (config.vocab_size, config.hidden_size)


def test_llada_moe_has_ids_that_no_file_of_the_checkpoint_names() -> None:
    """And shares its `model_type` with dense LLaDA; both names of its class are known."""
    spec = model_spec(LLADA_MOE | {"architectures": ["LLaDAMoEModel"]})
    assert (spec.family, spec.mask_id, spec.stop_ids, spec.shift) == ("llada_moe", 156895, {156892}, False)
    assert spec.attention == "bidirectional"
    assert spec.decoder.rotary_dim is None


def test_llada2_has_ids_that_no_file_of_the_checkpoint_names() -> None:
    spec = model_spec(LLADA2_MINI)
    assert (spec.mask_id, spec.stop_ids, spec.shift) == (156895, {156892}, False)
    assert (spec.attention, spec.block_length, spec.decoder.rotary_dim) == ("block_causal", 32, 64)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("LLaDA2.0-mini", "threshold"), ("LLaDA2.1-flash", "joint_threshold"), ("my-model", "threshold")],
)
def test_the_name_tells_whether_llada2_edits(name: str, rule: str) -> None:
    spec = model_spec(LLADA2_MINI | {NAME: name})
    assert (spec.rule, spec.threshold) == (rule, 0.95)


@pytest.mark.parametrize("more", [{"expert_capacity": 48, "block_size": 32}, {NAME: "LLaDA2.2-flash"}])
def test_llada2_2_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"LLaDA2\.2 .* not supported"):
        model_spec(LLADA2_FLASH | more)


def test_sdar_moe_has_the_ids_and_blocks_of_sdar() -> None:
    spec = model_spec(SDAR_30B_A3B | {NAME: "SDAR-30B-A3B-Chat-b16"})
    assert (spec.family, spec.mask_id, spec.stop_ids, spec.block_length) == (
        "sdar_moe",
        151669,
        {151643, 151645},
        16,
    )


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (LLADA_MOE, "clip_qkv", 8.0),
        (LLADA_MOE, "shared_expert_intermediate_size", 1024),
        (LLADA_MOE, "moe_layer_freq", [0] + [1] * 15),
        (LLADA_MOE, "moe_router_enable_expert_bias", True),
        (LLADA2_MINI, "use_bias", True),
        (LLADA2_MINI, "use_qk_norm", False),
        (LLADA2_MINI, "use_sliding_window", True),
        (SDAR_30B_A3B, "decoder_sparse_step", 2),
        (SDAR_30B_A3B, "mlp_only_layers", [0]),
    ],
)
def test_what_would_change_the_forward_pass_is_refused(config: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=field):
        model_spec(config | {field: value})


@pytest.mark.parametrize("change", [{"num_experts": 7}, {"num_experts_per_tok": 129}, {"num_experts": 8}])
def test_a_choice_that_cannot_be_made_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ModelLoadError, match="cannot be chosen"):
        model_spec(LLADA2_MINI | change)


def test_the_routers_bias_stays_in_float32(tmp_path: Path) -> None:
    folder = checkpoints.llada2(tmp_path, tokenizer=False)
    layer = load(folder, device="cpu", dtype="bfloat16").decoder.layers[1].mlp
    assert isinstance(layer, MixtureOfExperts)
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.expert_bias"]
    assert layer.router.bias is not None
    assert torch.equal(layer.router.bias, stored)
    assert (stored.bfloat16().float() != stored).any()
