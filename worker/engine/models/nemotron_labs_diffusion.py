"""Nemotron-Labs-Diffusion 3B, 8B, 14B: Ministral 3 with a causal context and blocks that see all of themselves.

Published with nvidia/Nemotron-Labs-Diffusion-3B: Ministral 3's layers under `encoder.`, a head of its own, YaRN
(factor 0.25 in the base, 16 in the instruct model) and queries that grow with their position. Finished text is written
causally, and its last position predicts the next block's first token, as in any autoregressive model; within a block
predictions are not shifted. `dlm_paradigm` tells how it was trained, not how it decodes. Threshold as in vLLM's policy.
"""

from __future__ import annotations

from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("NemotronLabsDiffusionModel",)
MASK_ID = 100
BLOCK_LENGTH = 32


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    require(config, "nemotron_labs_diffusion", attention_bias=False, mlp_bias=False, sliding_window=None)
    return ModelSpec(
        family="nemotron_labs_diffusion",
        decoder=llama_decoder(config),
        attention="causal_context",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config),
        block_length=config.get("block_size") or BLOCK_LENGTH,
        rule="threshold",
        threshold=0.9,
        tensor_name=_published_name,
    )


def _published_name(name: str) -> str:
    """`layers.3.q` -> `encoder.layers.3.self_attn.q_proj.weight`."""
    if name == "head":
        return "diffusion_head.weight"
    return f"encoder.{llama_name(name).removeprefix('model.')}"
