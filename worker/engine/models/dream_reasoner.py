"""DreamReasoner-8B: Qwen3 turned to a chain of blocks. It shares `model_type` with Dream, and little else.

Published with Dream-org/DreamReasoner-8B: Qwen3's names (norms per head of queries and keys, no biases), architecture
`DreamForCausalLM`, `block_size` and `mask_token_id` in `config.json`. Blocks are decoded one after the other as SDAR's
are, without Dream's shift. Its tokenizer is Qwen's, whatever class the checkpoint names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("DreamForCausalLM",)
MASK_ID = 151669
BLOCK_LENGTH = 32
END_OF_TURN = 151645


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    require(config, "dream_reasoner", attention_bias=False, use_sliding_window=False)
    return ModelSpec(
        family="dream_reasoner",
        decoder=replace(llama_decoder(config), qk_norm=True),
        attention="block_causal",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TURN),
        block_length=config.get("block_size") or BLOCK_LENGTH,
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
        commit="fused",
        tokenizer_class="Qwen2Tokenizer",
    )
