"""Qwen3 turned to a masked model by dLLM's recipe "A2D": bidirectional (`mdlm`), or a chain of blocks (`bd3lm`).

Published with dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1 and -bd3lm-v0.1: Qwen3's names and fields (per-head norms of
queries and keys, no biases, tied head), no mask id and no block length. The mask is the first id after Qwen3's own
tokens, which the recipe adds to the tokenizer without growing the embedding. Not shifted. The models were trained
without thinking.

Both variants have the same `config.json`; only the checkpoint's name tells them apart. `bd3lm` has blocks of 32, and
its sampler fills prompts on the left to whole blocks, so that the answer begins with one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, stop_ids
from worker.engine.models.spec import NAME, ModelSpec

ARCHITECTURES = ("A2DQwen3LMHeadModel",)
MASK_ID = 151669
END_OF_TEXT, END_OF_TURN = 151643, 151645


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    mdlm = ModelSpec(
        family="a2d_qwen3",
        decoder=replace(llama_decoder(config), qk_norm=True),
        attention="bidirectional",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TEXT, END_OF_TURN),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
        template_values={"enable_thinking": False},
    )
    if "bd3lm" in config.get(NAME, "").lower():
        return replace(mdlm, attention="block_causal", commit="fused", grid="answer")
    return mdlm
