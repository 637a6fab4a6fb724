"""LLaDA-MoE-7B-A1B: LLaDA's method over experts, in Llama's names and not in LLaDA's own.

Published with inclusionAI/LLaDA-MoE-7B-A1B-Instruct: `model_type` is that of dense LLaDA. The 8 best of 64 experts,
weighed by their softmax as it is: the published code renormalises nothing, whatever `norm_topk_prob` says. Norms of
queries and keys per head, no shift, no blocks. The mask id stands in no file of the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models.llama_names import llama_decoder, llama_name, require, stop_ids
from worker.engine.models.spec import DecoderConfig, Experts, ModelSpec

ARCHITECTURES = ("LLaDAMoEModelLM", "LLaDAMoEModel")
MASK_ID = 156895
END_OF_TEXT = 156892


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="llada_moe",
        decoder=_decoder(config),
        attention="bidirectional",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids({"eos_token_id": END_OF_TEXT} | config),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=llama_name,
    )


def _decoder(config: dict[str, Any]) -> DecoderConfig:
    # Options of the published code that no published checkpoint sets.
    require(
        config,
        "llada_moe",
        moe_layer_freq=[1] * config["num_hidden_layers"],
        moe_router_enable_expert_bias=False,
        shared_expert_intermediate_size=None,
        attention_bias=False,
        clip_qkv=None,
    )
    experts = Experts(
        number=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["expert_intermediate_size"],
        router="softmax",
        renormalise=False,
    )
    dense = llama_decoder(config | {"intermediate_size": config["dense_intermediate_size"]})
    return replace(dense, qk_norm=config["qk_layernorm"], experts=experts)
