"""Llama-shaped models adapted to denoise blocks after a causal context (the bundled demo model).

Published layout: Llama's weight names and config fields, plus `mask_token_id`, `block_length`, `denoise_rule`,
`denoise_threshold` and `denoise_commit`. How it decodes is told in `models/demo-adapter/README.md`.
"""

from __future__ import annotations

from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, stop_ids
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("LlamaForBlockDiffusion",)


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="llama_block_diffusion",
        decoder=llama_decoder(config),
        attention="causal_context",
        shift=True,
        mask_id=config["mask_token_id"],
        stop_ids=stop_ids(config),
        block_length=config["block_length"],
        rule=config.get("denoise_rule", "left_to_right"),
        threshold=config.get("denoise_threshold", 0.9),
        tensor_name=llama_name,
        commit=config.get("denoise_commit", "separate"),
    )
