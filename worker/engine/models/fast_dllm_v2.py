"""Fast-dLLM v2: Qwen2.5 turned to blocks of 32, each prediction read one position to the left.

Facts from the published config and modeling file (Efficient-Large-Model/Fast_dLLM_v2_7B): Qwen2's weight names with
biases on queries, keys and values, which no field names; the mask `|<MASK>|` is 151665 in the code, not in the config;
`bd_size` is the block length. Its sampler commits a block by a forward of its own, whose last position gives the next
block's first token. That sampler also goes through a block in parts of 8, which is left to the rule here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("Fast_dLLM_QwenForCausalLM",)
MASK_ID = 151665


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="fast_dllm_v2",
        decoder=replace(llama_decoder(config), qkv_bias=True),
        attention="block_causal",
        shift=True,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config),
        block_length=config["bd_size"],
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
        commit="separate",
    )
