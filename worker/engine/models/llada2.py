"""LLaDA2.0 and LLaDA2.1, mini and flash: blocks of 32 on a grid, experts after a first dense layer.

Published with inclusionAI/LLaDA2.1-mini: one weight for queries, keys and values, norms per head before a rotation of
half the head, a sigmoid router in float32 that looks for experts in the best groups, an expert for all. The config has
no mask id and no stop id. 2.0 and 2.1 have the same config; 2.1 was trained to edit what stands already, and only the
checkpoint's name tells that. LLaDA2.2 chooses experts for a block of positions at a time and is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contract.errors import ModelLoadError
from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import NAME, DecoderConfig, Experts, ModelSpec

ARCHITECTURES = ("LLaDA2MoeModelLM",)
MASK_ID = 156895
END_OF_TEXT = 156892

_OWN_NAMES = {
    "qkv": "attention.query_key_value.weight",
    "o": "attention.dense.weight",
    "q_norm": "attention.query_layernorm.weight",
    "k_norm": "attention.key_layernorm.weight",
    "router_bias": "mlp.gate.expert_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    name = config.get(NAME, "").lower()
    if config.get("expert_capacity") or "llada2.2" in name:
        raise ModelLoadError(
            "LLaDA2.2 chooses its experts for a whole block (config.json: expert_capacity), which is not supported; "
            "LLaDA2.0 and LLaDA2.1 are"
        )
    return ModelSpec(
        family="llada2",
        decoder=_decoder(config),
        attention="block_causal",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids({"eos_token_id": END_OF_TEXT} | config),
        block_length=32,
        rule="joint_threshold" if "llada2.1" in name else "threshold",
        threshold=0.95,
        tensor_name=_published_name,
        commit="fused",
    )


def _decoder(config: dict[str, Any]) -> DecoderConfig:
    require(
        config,
        "llada2",
        use_bias=False,
        use_qkv_bias=False,
        use_qk_norm=True,
        use_sliding_window=False,
        norm_head=False,
    )
    width = config["moe_intermediate_size"]
    experts = Experts(
        number=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=width,
        router="sigmoid",
        renormalise=True,
        scale=config["routed_scaling_factor"],
        groups=config["n_group"],
        top_groups=config["topk_group"],
        bias=True,
        shared_intermediate_size=width * (config.get("num_shared_experts") or 0),
        dense_layers=config["first_k_dense_replace"],
    )
    return replace(llama_decoder(config), qk_norm=True, fused_qkv=True, experts=experts)


def _published_name(name: str) -> str:
    """Llama's names but for the embedding, attention, and what Llama does not have."""
    if name == "embed":
        return "model.word_embeddings.weight"
    layer, _, part = name.rpartition(".")
    return f"model.{layer}.{_OWN_NAMES[part]}" if part in _OWN_NAMES else llama_name(name)
