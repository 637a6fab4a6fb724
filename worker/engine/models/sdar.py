"""SDAR and TraDo, dense: Qwen3's layout, blocks denoised one after the other (JetAstra/SDAR, Gen-Verse's TraDo).

Qwen3's weight names, with a norm per head before the rotation, no biases, and a head that is stored beside the
embedding. Published configs name neither the mask id (engines fix it at 151669) nor the block length, which stands in
the repository's name: `SDAR-4B-Chat-b8` has blocks of 8, names without such a part blocks of 4.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, stop_ids
from worker.engine.models.spec import NAME, ModelSpec

ARCHITECTURES = ("SDARForCausalLM",)
MASK_ID = 151669
END_OF_TURN = 151645
"""`<|im_end|>`: chat turns end with it, while the config's `eos_token_id` is `<|endoftext|>`."""
BLOCK_LENGTH = 4


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="sdar",
        decoder=replace(llama_decoder(config), qk_norm=True),
        attention="block_causal",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TURN),
        block_length=config.get("block_size") or _named_block_length(config.get(NAME, "")),
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
        commit="fused",
    )


def _named_block_length(name: str) -> int:
    """The number of a part `b8`, `b16` … of the checkpoint's name."""
    found = re.search(r"[-_]b(\d+)(?![^-_])", name)
    return int(found[1]) if found else BLOCK_LENGTH
