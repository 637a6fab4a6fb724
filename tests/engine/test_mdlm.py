"""MDLM and BD3-LM: the published layout loads, logits and tokens are those of a plainly written transformer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from contract.errors import ModelLoadError
from tests import checkpoints
from tests.engine.dit_reference import DitReference
from tests.engine.reference import Recipe, worth_comparing
from tests.engine.running import prompt, request
from tests.engine.test_against_reference import LENGTHS, asked, engine_answers, recipe_of, recording
from tests.engine.test_families import RULES
from tests.engine.test_mix_property import BUDGETS, Guest, bounded, hold, mixes
from worker.engine import Loaded, load
from worker.engine.models.decoders import build, shapes
from worker.engine.models.registry import model_spec
from worker.engine.sequence import State

MDLM_SMALL: dict[str, Any] = {
    "architectures": ["MDLM"],
    "cond_dim": 128,
    "dropout": 0.1,
    "hidden_dim": 768,
    "model_length": 1024,
    "model_type": "mdlm",
    "n_blocks": 12,
    "n_heads": 12,
    "time_conditioning": False,
    "vocab_size": 50258,
}
BD3LM_SMALL = MDLM_SMALL | {"architectures": ["BD3LM"], "model_type": "bd3lm", "block_size": 16, "adaln": True}


def loaded_from(write: Callable[..., Path], factory: pytest.TempPathFactory, **options: Any) -> Loaded:
    return load(write(factory.mktemp("dit"), tokenizer=False, **options), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def bd3lm(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loaded_from(checkpoints.bd3lm, tmp_path_factory)


@pytest.fixture(scope="module")
def reference() -> DitReference:
    return DitReference()


@pytest.mark.parametrize("commit", ["separate", "fused"])
@pytest.mark.parametrize("adaln", [True, False])
def test_block_causal_logits_agree_on_mixed_lengths(
    tmp_path_factory: pytest.TempPathFactory, adaln: bool, commit: str
) -> None:
    """In every forward of every block, with adaptive norms and with plain ones."""
    reference = DitReference(adaln)
    engine, logits = recording(loaded_from(checkpoints.bd3lm, tmp_path_factory, adaln=adaln))
    for n in LENGTHS:
        engine.add(request(n, prompt(n, n), max_new_tokens=10, block_length=4, rule="threshold", commit=commit))
    while engine.active():
        rows = [*engine.scheduler.running, *engine.scheduler.waiting]
        rows.sort(key=lambda row: row.state is State.PREFILLING)  # as they are scheduled
        wanted = [torch.empty(0, checkpoints.VOCABULARY)]
        wanted += [reference.block_logits(row.canvas, 4)[asked(row)] for row in rows]
        engine.step()
        torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("block_length", [4, 16])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_block_causal_tokens_are_those_of_the_plain_sampler(
    bd3lm: Loaded, reference: DitReference, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: reference.block_answer(prompt(n, n), recipe) for n in LENGTHS}
    assert engine_answers(bd3lm, recipe, commit="separate") == expected
    assert engine_answers(bd3lm, recipe, commit="fused") == expected


@settings(bounded, max_examples=15)
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_blocks(
    bd3lm: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(bd3lm, mix, max_rows, max_step_tokens)


def test_the_reference_of_blocks_is_worth_comparing_with(reference: DitReference) -> None:
    recipe = Recipe(max_new_tokens=32, block_length=8, rule="threshold", number=0.6)
    worth_comparing([reference.block_answer(prompt(n, 6), recipe) for n in range(20)])


def test_the_noise_level_of_zero_says_something(reference: DitReference) -> None:
    """Else folding it into the weights would prove nothing."""
    canvas = [*prompt(7, 7), *[checkpoints.MASK] * 9]
    expected = reference.full_logits(canvas)
    assert (DitReference(adaln=False).full_logits(canvas) - expected).abs().max() > 1
    assert (DitReference(noise_level=1.0).full_logits(canvas) - expected).abs().max() > 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_folded_is_rounded_once(tmp_path: Path, dtype: str) -> None:
    decoder: Any = load(checkpoints.mdlm(tmp_path, tokenizer=False), "cpu", dtype).decoder
    assert decoder.layers[0].attention_norm.bias.dtype == decoder.dtype == getattr(torch, dtype)


def test_mdlm_small_has_the_published_parameters() -> None:
    spec = model_spec(MDLM_SMALL)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted) == 12 * 10 + 10
    assert sum(math.prod(shape) for shape in wanted.values()) == 169_627_218
    decoder = build(replace(spec.decoder, max_positions=8), lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.head.shape == (50258, 768)


def test_ids_are_those_of_gpt2_and_one_more() -> None:
    for config in (MDLM_SMALL, BD3LM_SMALL):
        spec = model_spec(config)
        assert (spec.mask_id, spec.stop_ids, spec.shift) == (50257, {50256}, False)
        assert spec.decoder.max_positions == 1024


@pytest.mark.parametrize("block_size", [4, 8, 16, 1024])
def test_bd3lm_has_blocks_and_mdlm_a_canvas(block_size: int) -> None:
    spec = model_spec(BD3LM_SMALL | {"block_size": block_size})
    assert (spec.family, spec.attention, spec.block_length) == ("bd3lm", "block_causal", block_size)
    spec = model_spec(MDLM_SMALL)
    assert (spec.family, spec.attention, spec.block_length) == ("mdlm", "bidirectional", 1024)
    assert model_spec(BD3LM_SMALL | {"cross_attn": False}).attention == "bidirectional"


@pytest.mark.parametrize("option", ["time_conditioning", "causal"])
def test_what_would_change_the_forward_pass_is_refused(option: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{option} True is not supported"):
        model_spec(BD3LM_SMALL | {option: True})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cond_dim": 25}, r"sigma_map\.mlp\.0\.weight has shape \[24, 256\], expected \[25, 256\]"),
        ({"adaln": False}, "unexpected backbone.blocks.0.adaLN_modulation.bias"),
    ],
    ids=str,
)
def test_norms_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    folder = checkpoints.bd3lm(tmp_path, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=complaint):
        load(folder, "cpu", "float32")


def test_what_is_stored_and_says_nothing_new_may_be_missing(tmp_path: Path) -> None:
    folder = checkpoints.bd3lm(tmp_path, tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    spare = {"backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max"}
    assert spare < weights.keys()
    save_file({name: w for name, w in weights.items() if name not in spare}, folder / "model.safetensors")
    assert load(folder, "cpu", "float32").spec.family == "bd3lm"
