"""WeDLM-7B and -8B: Qwen2.5 and Qwen3, still causal, that denoise by the order of their input (Tencent/WeDLM).

Qwen's names and fields, with switches for biases (`attention_bias`, the class's default is on) and norms of queries
and keys (`qk_norm`, off). The mask is 151665 in the code of both, whatever that id is to their tokenizers. Not shifted.
The authors' engine decodes in a window of 16 positions, by entropy below 0.4 with a charge for distance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("WeDLMForCausalLM",)
MASK_ID = 151665
END_OF_TEXT, END_OF_TURN = 151643, 151645


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    require(config, "wedlm", use_sliding_window=False)
    return ModelSpec(
        family="wedlm",
        decoder=replace(
            llama_decoder(config),
            qkv_bias=bool(config.get("attention_bias", True)),
            qk_norm=bool(config.get("qk_norm", False)),
        ),
        attention="causal",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TEXT, END_OF_TURN),
        block_length=16,
        rule="entropy_threshold",
        threshold=0.9,
        tensor_name=llama_name,
    )
