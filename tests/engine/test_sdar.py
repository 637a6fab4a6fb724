"""SDAR's facts from published configurations, by shapes alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from worker.engine import load
from worker.engine.loading import checkpoint_name
from worker.engine.models.decoder import shapes
from worker.engine.models.registry import model_spec
from worker.engine.models.spec import NAME

# JetLM/SDAR-4B-Chat
SDAR_4B: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 32768,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_sdar_4b_has_the_published_number_of_tensors_and_bytes() -> None:
    table = shapes(model_spec(SDAR_4B).decoder)
    assert len(table) == 399
    assert 2 * sum(math.prod(shape) for shape in table.values()) == 8_822_848_512  # bfloat16


def test_what_the_config_leaves_out_is_the_familys() -> None:
    spec = model_spec(SDAR_4B)
    assert (spec.mask_id, spec.block_length, spec.attention, spec.shift) == (151669, 4, "block_causal", False)
    assert spec.stop_ids == {151643, 151645}
    assert model_spec(SDAR_4B | {"mask_token_id": 151662, "block_size": 16}).block_length == 16
    assert model_spec(SDAR_4B | {"mask_token_id": 151662}).mask_id == 151662


@pytest.mark.parametrize(
    ("name", "block_length"),
    [
        ("SDAR-4B-Chat", 4),
        ("SDAR-4B-Chat-b8", 8),
        ("SDAR-8B-Chat-b64", 64),
        ("sdar_b16_mine", 16),
        ("TraDo-8B-Instruct", 4),
        ("SDAR-4B-Chat-b8x", 4),
        ("", 4),
    ],
)
def test_the_name_tells_the_block_length(name: str, block_length: int) -> None:
    assert model_spec(SDAR_4B | {NAME: name}).block_length == block_length


def test_the_loader_hands_over_the_folders_name(tmp_path: Path) -> None:
    folder = checkpoints.sdar(tmp_path / "SDAR-tiny-b16", tokenizer=False)
    assert load(folder, "cpu", "float32").spec.block_length == 16
    snapshot = tmp_path / "models--JetLM--SDAR-4B-Chat-b8" / "snapshots" / "0123abcd"
    assert checkpoint_name(snapshot) == "SDAR-4B-Chat-b8"
