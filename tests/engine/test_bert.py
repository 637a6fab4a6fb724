"""BERT: its layout loads, logits and tokens are those of transformers' model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from contract.errors import BadPrompt, ModelLoadError
from tests import checkpoints
from tests.engine.encoder_reference import BertReference
from tests.engine.running import engine_of, prompt, request
from tests.engine.test_against_reference import LENGTHS, engine_answers, recipe_of, recording
from tests.engine.test_families import RULES, varied
from tests.engine.test_mix_property import BUDGETS, Guest, bounded, hold, mixes
from worker.engine import Loaded, load
from worker.engine.models.decoders import build, shapes
from worker.engine.models.registry import model_spec


@dataclass(frozen=True)
class Pair:
    loaded: Loaded
    reference: BertReference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.bert(tmp_path_factory.mktemp("bert"), tokenizer=False)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return Pair(load(folder, device="cpu", dtype="float32"), BertReference(folder))


def test_logits_agree_on_mixed_lengths(pair: Pair) -> None:
    engine, logits = recording(pair.loaded)
    for n in (*LENGTHS, 500):
        engine.add(request(n, prompt(n, n), max_new_tokens=n % 7 + 4, block_length=4))
    engine.step()
    canvases = {n: [*prompt(n, n), *[checkpoints.MASK] * (n % 7 + 4)] for n in (*LENGTHS, 500)}
    expected = torch.cat([pair.reference.full_logits(canvas)[n : n + 4] for n, canvas in canvases.items()])
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("block_length", [5, 32])
@pytest.mark.parametrize(("rule", "number"), RULES)
def test_tokens_are_those_of_the_plain_sampler(
    pair: Pair, rule: str, number: float | tuple[float, float], block_length: int, cache: str
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: pair.reference.bidirectional_answer(prompt(n, n), recipe, cache) for n in LENGTHS}
    assert engine_answers(pair.loaded, recipe, cache=cache) == expected


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix(
    pair: Pair, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(pair.loaded, mix, max_rows, max_step_tokens)


def test_the_reference_is_worth_comparing_with(pair: Pair) -> None:
    varied(pair.reference)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_texts_end_with_the_padding_also_where_it_is_token_0(folder: Path) -> None:
    published = {"vocab_size": 30522, "mask_token_id": None, "pad_token_id": 0}
    spec = model_spec(config_of(folder) | published)
    assert (spec.mask_id, spec.stop_ids, spec.shift, spec.attention) == (103, {0}, False, "bidirectional")


def test_the_learned_positions_are_the_context(pair: Pair) -> None:
    with pytest.raises(BadPrompt, match="context of 512"):
        engine_of(pair.loaded).add(request(0, prompt(0, 512)))


@pytest.mark.parametrize(
    ("option", "value"),
    [("hidden_act", "relu"), ("position_embedding_type", "relative_key"), ("is_decoder", True)],
)
def test_what_would_change_the_forward_pass_is_refused(folder: Path, option: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"{option} {value} is not supported"):
        model_spec(config_of(folder) | {option: value})


def test_heads_of_other_tasks_are_left_alone(tmp_path: Path) -> None:
    folder = checkpoints.bert(tmp_path, tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    weights["bert.pooler.dense.weight"] = torch.zeros(checkpoints.HIDDEN, checkpoints.HIDDEN)
    weights["cls.seq_relationship.bias"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors")
    assert load(folder, "cpu", "float32").spec.family == "bert"


def test_bert_base_has_the_published_total(folder: Path) -> None:
    published = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    published |= {"vocab_size": 30522, "mask_token_id": None, "pad_token_id": 0}
    spec = model_spec(config_of(folder) | published)
    wanted = shapes(spec.decoder)
    assert len({spec.tensor_name(ours) for ours in wanted}) == len(wanted) == 202
    assert sum(math.prod(shape) for shape in wanted.values()) == 109_514_298
    decoder = build(replace(spec.decoder, max_positions=8), lambda ours: torch.empty(wanted[ours], device="meta"))
    assert decoder.head.shape == (30522, 768)
