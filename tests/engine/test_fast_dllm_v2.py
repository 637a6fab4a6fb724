"""Fast-dLLM v2's facts from the published configuration, by shapes alone."""

from __future__ import annotations

import math
from typing import Any

from worker.engine.models.decoder import shapes
from worker.engine.models.registry import model_spec

# Efficient-Large-Model/Fast_dLLM_v2_7B
FAST_DLLM_V2_7B: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration.Fast_dLLM_QwenConfig",
        "AutoModel": "modeling.Fast_dLLM_QwenModel",
        "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM",
    },
    "bd_size": 32,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151645,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}


def test_the_7b_has_the_published_number_of_tensors_and_bytes() -> None:
    table = shapes(model_spec(FAST_DLLM_V2_7B).decoder)
    assert len(table) == 339
    assert 2 * sum(math.prod(shape) for shape in table.values()) == 15_231_233_024  # bfloat16


def test_what_the_config_leaves_out_is_the_familys() -> None:
    spec = model_spec(FAST_DLLM_V2_7B)
    assert (spec.mask_id, spec.block_length, spec.attention, spec.shift) == (151665, 32, "block_causal", True)
    assert spec.stop_ids == {151645}
