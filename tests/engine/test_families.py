"""Every dense family with a bidirectional canvas: its published layout loads, and its logits and tokens are those of an
independent model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.dit_reference import DitReference
from tests.engine.encoder_reference import BertReference, ModernBertReference
from tests.engine.reference import Recipe, Reference, worth_comparing
from tests.engine.running import prompt, request
from tests.engine.test_against_reference import LENGTHS, engine_answers, recipe_of, recording
from tests.engine.test_mix_property import BUDGETS, Guest, bounded, hold, mixes
from worker.engine import Loaded, load
from worker.engine.models.decoder import Decoder, shapes
from worker.engine.models.registry import model_spec


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint, and what makes of its folder the independent model that it must agree with."""

    write: Callable[..., Path]
    reference: Callable[[Path], Reference]


@dataclass(frozen=True)
class Pair:
    loaded: Loaded
    reference: Reference


FAMILIES = {
    "dream": Family(checkpoints.dream, lambda _: Reference(tied=False, shape=checkpoints.QWEN2, shift=1)),
    "a2d_qwen3": Family(checkpoints.a2d_qwen3, lambda _: Reference(tied=True, shape=checkpoints.QWEN3)),
    "illada": Family(checkpoints.illada, lambda _: Reference(tied=True)),
    "bert": Family(checkpoints.bert, BertReference),
    "modernbert": Family(checkpoints.modernbert, ModernBertReference),
    "mdlm": Family(checkpoints.mdlm, lambda _: DitReference()),
}
MIXED = ("bert", "modernbert", "mdlm")
"""Those with decoders of their own, which other mixes do not run through."""
RULES = (
    ("fixed_steps", 14),
    ("threshold", 0.6),
    ("joint_threshold", (0.2, 0.3)),
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family = FAMILIES[request.param]
    folder = family.write(tmp_path_factory.mktemp(request.param), tokenizer=False)
    return Pair(load(folder, device="cpu", dtype="float32"), family.reference(folder))


def test_logits_agree_on_mixed_lengths(pair: Pair) -> None:
    engine, logits = recording(pair.loaded)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=n % 7 + 4, block_length=4))
    engine.step()
    wanted = []
    for n in LENGTHS:
        canvas = [*prompt(n, n), *[checkpoints.MASK] * (n % 7 + 4)]
        first = n - pair.reference.shift
        wanted.append(pair.reference.full_logits(canvas)[first : first + 4])
    torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("block_length", [5, 32])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_tokens_are_those_of_the_plain_sampler(
    pair: Pair, rule: str, number: float | tuple[float, float], block_length: int, cache: str
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: pair.reference.bidirectional_answer(prompt(n, n), recipe, cache) for n in LENGTHS}
    assert engine_answers(pair.loaded, recipe, cache=cache) == expected


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("block_length", [1, 5])
def test_tokens_agree_when_most_is_read_at_the_edge_of_a_block(
    pair: Pair, block_length: int, refresh: int, cache: str
) -> None:
    """Blocks of one position, and blocks that begin without computing the whole canvas."""
    recipe = recipe_of("threshold", 0.6, block_length)
    expected = {n: pair.reference.bidirectional_answer(prompt(n, n), recipe, cache, refresh) for n in LENGTHS}
    assert engine_answers(pair.loaded, recipe, cache=cache, cache_refresh=refresh) == expected


@pytest.mark.parametrize("pair", MIXED, indirect=True)
@settings(bounded, max_examples=15)
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix(
    pair: Pair, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(pair.loaded, mix, max_rows, max_step_tokens)


def test_the_references_are_worth_comparing_with(pair: Pair) -> None:
    recipe = Recipe(max_new_tokens=32, block_length=8, rule="threshold", number=0.6)
    worth_comparing([pair.reference.bidirectional_answer(prompt(n, 6), recipe, "none") for n in range(20)])


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_dream_has_the_published_ids_where_the_vocabulary_holds_them(tmp_path: Path) -> None:
    config = config_of(checkpoints.dream(tmp_path, tokenizer=False)) | {"vocab_size": 152064, "eos_token_id": 151643}
    spec = model_spec(config | {"mask_token_id": None})
    assert (spec.mask_id, spec.stop_ids, spec.shift) == (151666, {151643, 151645, 151667}, True)


def test_a2d_qwen3_has_ids_and_template_values_that_no_file_of_the_checkpoint_names(tmp_path: Path) -> None:
    config = config_of(checkpoints.a2d_qwen3(tmp_path, tokenizer=False)) | {"vocab_size": 151936}
    del config["mask_token_id"]
    spec = model_spec(config | {"eos_token_id": 151645})
    assert (spec.mask_id, spec.stop_ids, spec.shift) == (151669, {151643, 151645}, False)
    assert spec.template_values == {"enable_thinking": False}


def test_illada_has_ids_that_no_file_of_the_checkpoint_names(tmp_path: Path) -> None:
    config = config_of(checkpoints.illada(tmp_path, tokenizer=False))
    del config["mask_token_id"], config["eos_token_id"]
    spec = model_spec(config)
    assert (spec.mask_id, spec.stop_ids, spec.shift) == (5, {2}, False)


def test_illada_with_layer_norms_is_refused(tmp_path: Path) -> None:
    config = config_of(checkpoints.illada(tmp_path, tokenizer=False))
    with pytest.raises(ModelLoadError, match="layer_norm_eps"):
        model_spec(config | {"layer_norm_eps": 1e-5})


QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 151643}
PUBLISHED = {
    "LLaDA-8B-Instruct": (
        {
            "architectures": ["LLaDAModelLM"],
            "d_model": 4096,
            "n_heads": 32,
            "n_kv_heads": 32,
            "n_layers": 32,
            "mlp_hidden_size": 12288,
            "vocab_size": 126464,
            "embedding_size": 126464,
            "max_sequence_length": 4096,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "weight_tying": False,
            "mask_token_id": 126336,
            "eos_token_id": 126081,
        },
        291,
        8_015_581_184,  # six shards of 16 GB in bfloat16
    ),
    "DiffuCoder-7B-Instruct": (
        {
            **QWEN,
            "architectures": ["DreamModel"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "mask_token_id": 151666,
        },
        339,
        15_231_233_024 // 2,  # the bytes in bfloat16 of Fast-dLLM v2 7B, which has the shapes of the same Qwen2.5-7B
    ),
    "Qwen3-0.6B-diffusion-mdlm-v0.1": (
        {
            **QWEN,
            "architectures": ["A2DQwen3LMHeadModel"],
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        310,
        596_049_920,  # Qwen3-0.6B
    ),
    "iLLaDA-8B-Instruct": (
        {
            "architectures": ["ILLaDAForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 155136,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        290,
        7_615_025_152,  # published as 7.62 B
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_configurations_have_the_published_totals(name: str) -> None:
    config, tensors, parameters = PUBLISHED[name]
    spec = model_spec(config)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted) == tensors
    assert sum(math.prod(shape) for shape in wanted.values()) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_configurations_can_be_built(name: str) -> None:
    spec = model_spec(PUBLISHED[name][0])
    wanted = shapes(spec.decoder)
    decoder = Decoder(replace(spec.decoder, max_positions=8), lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.head.shape == (spec.decoder.vocab_size, spec.decoder.hidden_size)
