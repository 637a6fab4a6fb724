"""iLLaDA-8B: LLaDA's method in Llama's layout, with another vocabulary and grouped-query attention.

Published with its modeling_illada.py: Llama's names and fields; the head is tied and may be stored as well; the mask
is `<[MASK]>` = 5, which stands in no file of the checkpoint (LLaDA's 126336 is an ordinary token here); bos 0, pad 1,
eos 2. Rotation in the model's dtype, no shift. The authors also decode with a canvas that grows block by block.
"""

from __future__ import annotations

from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("ILLaDAForCausalLM",)
MASK_ID = 5
END_OF_TEXT = 2


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    # Options of the published code that no published checkpoint sets.
    require(config, "illada", layer_norm_eps=None, attention_bias=False, mlp_bias=False)
    return ModelSpec(
        family="illada",
        decoder=llama_decoder(config),
        attention="bidirectional",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids({"eos_token_id": END_OF_TEXT} | config),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
    )
