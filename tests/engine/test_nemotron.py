"""Nemotron-Labs-Diffusion: a causal context, blocks that are not shifted, YaRN, queries that grow."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.reference import Recipe, Reference, worth_comparing
from tests.engine.running import prompt, request
from tests.engine.test_against_reference import LENGTHS, RULES, engine_answers, opening, recipe_of, recording
from worker.engine import Loaded
from worker.engine.models.decoder import Decoder, shapes
from worker.engine.models.registry import model_spec
from worker.engine.models.rope import Yarn

# nvidia/Nemotron-Labs-Diffusion-3B-Base
NEMOTRON_3B: dict[str, Any] = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "auto_map": {
        "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
        "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
    },
    "attention_bias": False,
    "block_size": 32,
    "bos_token_id": 1,
    "dlm_paradigm": "bidirectional",
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "mask_token_id": 100,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": 32,
    "num_hidden_layers": 26,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 0.25,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tied=False, shape=checkpoints.MINISTRAL3)


def test_logits_agree_on_mixed_lengths(nemotron: Loaded, reference: Reference) -> None:
    """The longest prompt is four times as long as the context before YaRN."""
    engine, logits = recording(nemotron)
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=8, block_length=4, rule="left_to_right", threshold=1.0))
    engine.step()
    expected = torch.stack([reference.causal_logits(list(prompt(n, n)), n)[-1] for n in LENGTHS])
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=0)
    slots = {n: opening(row) for n, row in zip(LENGTHS, expected, strict=True)}
    engine.step()
    wanted = [
        reference.causal_logits([*prompt(n, n), slot, *[checkpoints.MASK] * 3], n)[n + 1 : n + 4]
        for n, slot in slots.items()
        if slot != checkpoints.STOP
    ]
    torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_length", [1, 4, 6])
@pytest.mark.parametrize(("rule", "number"), RULES[::3])
def test_tokens_are_those_of_the_plain_sampler(
    nemotron: Loaded, reference: Reference, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: reference.causal_answer(prompt(n, n), recipe, shift=0) for n in LENGTHS}
    assert engine_answers(nemotron, recipe) == expected
    expected = {n: reference.fused_answer(prompt(n, n), recipe, shift=0) for n in LENGTHS}
    assert engine_answers(nemotron, recipe, commit="fused") == expected


def test_the_reference_is_worth_comparing_with(reference: Reference) -> None:
    recipe = Recipe(max_new_tokens=32, block_length=8, rule="threshold", number=0.6)
    worth_comparing([reference.causal_answer(prompt(n, 6), recipe, shift=0) for n in range(20)])


def test_the_3b_has_the_published_tensors_and_the_file_its_size() -> None:
    """A file of safetensors is a length, a header in JSON, and the tensors; the published size is the file's."""
    spec = model_spec(NEMOTRON_3B)
    table = {spec.tensor_name(name): shape for name, shape in shapes(spec.decoder).items()}
    assert len(table) == 237
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in sorted(table):
        end = at + 2 * math.prod(table[name])
        header[name] = {"dtype": "BF16", "shape": table[name], "data_offsets": [at, end]}
        at = end
    assert at == 7_663_319_040
    length = len(json.dumps(header, separators=(",", ":")))
    assert 8 + -(-length // 8) * 8 + at == 7_663_347_000


def test_what_the_config_says_is_what_is_decoded() -> None:
    spec = model_spec(NEMOTRON_3B)
    assert (spec.attention, spec.shift, spec.mask_id, spec.block_length) == ("causal_context", False, 100, 32)
    assert spec.stop_ids == {2}
    assert spec.decoder.yarn == Yarn(0.25, 16384, query_beta=0.1)
    assert model_spec(NEMOTRON_3B | {"eos_token_id": 11}).stop_ids == {11}
    assert spec.tensor_name("head") == "diffusion_head.weight"
    assert spec.tensor_name("embed") == "encoder.embed_tokens.weight"
    assert spec.tensor_name("layers.3.k") == "encoder.layers.3.self_attn.k_proj.weight"


@pytest.mark.parametrize("option", [{"attention_bias": True}, {"mlp_bias": True}, {"sliding_window": 4096}])
def test_options_that_no_published_model_sets_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=next(iter(option))):
        model_spec(NEMOTRON_3B | option)


@pytest.mark.parametrize("architecture", ["EfficientDLM", "DiffEncoderModel"])
def test_look_alikes_are_unknown(architecture: str) -> None:
    """nvidia/Efficient-DLM-4B and Nemotron-Diffusion-Research-8B-v0: Qwen3's layers, other masks."""
    with pytest.raises(ModelLoadError, match=f"unknown model family '{architecture}'"):
        model_spec(NEMOTRON_3B | {"architectures": [architecture]})


def test_the_instruct_models_context_can_be_built() -> None:
    """A quarter of it: its queries grow, while those of the base never leave the original context."""
    rope = NEMOTRON_3B["rope_parameters"] | {"factor": 16.0}
    spec = model_spec(NEMOTRON_3B | {"rope_parameters": rope, "max_position_embeddings": 65536})
    wanted = shapes(spec.decoder)
    decoder = Decoder(spec.decoder, lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.query_scale is not None
    assert decoder.query_scale.shape == (65536, 1, 1)
    base = model_spec(NEMOTRON_3B).decoder
    assert Decoder(base, lambda ours: torch.empty(wanted[ours], device="meta")).query_scale is None
