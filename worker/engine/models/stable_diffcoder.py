"""Stable-DiffCoder-8B: Seed-Coder, a Llama, turned to a chain of blocks of 4.

Published with ByteDance-Seed/Stable-DiffCoder-8B-Instruct: `model_type` is `llama`, names and fields are Llama's; the
older upload's class is `SeedDiffcoderForCausalLM`. Mask (`<[MASK_TOKEN]>`, 5) and block length stand in the code only.
Not shifted. Its sampler cuts the last block so that the text ends where the answer does, and starts at threshold 0.95.
"""

from __future__ import annotations

from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM")
MASK_ID = 5


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    require(config, "stable_diffcoder", attention_bias=False, mlp_bias=False)
    return ModelSpec(
        family="stable_diffcoder",
        decoder=llama_decoder(config),
        attention="block_causal",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config),
        block_length=4,
        rule="threshold",
        threshold=0.95,
        tensor_name=llama_name,
        commit="fused",
        last_block="cut",
    )
