"""Dream-7B, Dream-Coder and DiffuCoder: Qwen2.5 turned to a bidirectional masked model that kept its shift.

Published with Dream-org/Dream-v0-Instruct-7B and apple/DiffuCoder-7B-Instruct: Qwen2's names and fields; biases on
queries, keys and values are in no field but always there. Logits are read one position to the left. `mask_token_id`
stands in `config.json` (it is null in `generation_config.json`). The authors' sampler has no blocks; block length and
threshold are those of Fast-dLLM's runs of Dream. DreamReasoner shares the `model_type` and is another model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("DreamModel",)
MASK_ID = 151666
END_OF_TURN, PADDING = 151645, 151667  # <|im_end|>, and DiffuCoder's <|dlm_pad|>, at which its authors cut


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="dream",
        decoder=replace(llama_decoder(config), qkv_bias=True),
        attention="bidirectional",
        shift=True,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TURN, PADDING),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
        tokenizer_class="Qwen2Tokenizer",
    )
