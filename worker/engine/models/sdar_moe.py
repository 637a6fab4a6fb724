"""SDAR-30B-A3B: SDAR in Qwen3-MoE's layout, with experts in every layer and everything else as the dense models.

Facts of the router from the engines that run it: softmax over all experts, the chosen ones renormalised where
`norm_topk_prob` says so, no bias, no shared expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.engine.models import sdar
from worker.engine.models.llama_names import require
from worker.engine.models.spec import Experts, ModelSpec

ARCHITECTURES = ("SDARMoeForCausalLM",)


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    require(config, "sdar_moe", decoder_sparse_step=1, mlp_only_layers=[])
    experts = Experts(
        number=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        router="softmax",
        renormalise=config["norm_topk_prob"],
    )
    dense = sdar.spec(config)
    return replace(dense, family="sdar_moe", decoder=replace(dense.decoder, experts=experts))
