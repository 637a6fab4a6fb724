"""BERT, beside what `test_families` shows of it: its context, its end of text, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.errors import BadPrompt, ModelLoadError
from tests import checkpoints
from tests.engine.encoder_reference import BertReference
from tests.engine.running import engine_of, prompt, request
from tests.engine.test_against_reference import recording
from worker.engine import load
from worker.engine.models.decoders import build, shapes
from worker.engine.models.registry import model_spec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.bert(tmp_path_factory.mktemp("bert"), tokenizer=False)


def test_logits_agree_near_the_end_of_the_context(folder: Path) -> None:
    engine, logits = recording(load(folder, device="cpu", dtype="float32"))
    engine.add(request(0, prompt(0, 500), max_new_tokens=7, block_length=4))
    engine.step()
    expected = BertReference(folder).full_logits([*prompt(0, 500), *[checkpoints.MASK] * 7])[500:504]
    torch.testing.assert_close(logits[-1], expected, atol=1e-4, rtol=0)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_texts_end_with_the_padding_also_where_it_is_token_0(folder: Path) -> None:
    published = {"vocab_size": 30522, "mask_token_id": None, "pad_token_id": 0}
    spec = model_spec(config_of(folder) | published)
    assert (spec.mask_id, spec.stop_ids, spec.shift, spec.attention) == (103, {0}, False, "bidirectional")


def test_the_learned_positions_are_the_context(folder: Path) -> None:
    with pytest.raises(BadPrompt, match="context of 512"):
        engine_of(load(folder, device="cpu", dtype="float32")).add(request(0, prompt(0, 512)))


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
