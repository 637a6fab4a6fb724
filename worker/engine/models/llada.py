"""LLaDA-8B and LLaDA-1.5: a bidirectional masked model in OLMo's layout.

Names and fields as published with GSAI-ML/LLaDA-8B-Instruct: `ff_proj` is the gate, `up_proj` the linear up
projection, a block's `ff_out` the down projection; the model's own `ff_out` is the head. No biases, no shift, MHA.
"""

from __future__ import annotations

from typing import Any

from worker.engine.models.llama_names import stop_ids
from worker.engine.models.spec import DecoderConfig, ModelSpec

ARCHITECTURES = ("LLaDAModelLM",)
MASK_ID = 126336
END_OF_TURN = 126348

_IN_BLOCK = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ff_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
_OUTSIDE = {"embed": "wte", "norm": "ln_f", "head": "ff_out"}


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    return ModelSpec(
        family="llada",
        decoder=_decoder(config),
        attention="bidirectional",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=stop_ids(config, END_OF_TURN),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=_published_name,
    )


def _decoder(config: dict[str, Any]) -> DecoderConfig:
    heads = config["n_heads"]
    return DecoderConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        hidden_size=config["d_model"],
        intermediate_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        layers=config["n_layers"],
        heads=heads,
        kv_heads=config.get("n_kv_heads") or heads,
        head_dim=config["d_model"] // heads,
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_positions=config["max_sequence_length"],
        tied_head=bool(config.get("weight_tying", False)),
    )


def _published_name(name: str) -> str:
    """`layers.3.gate` -> `model.transformer.blocks.3.ff_proj.weight`."""
    if name in _OUTSIDE:
        return f"model.transformer.{_OUTSIDE[name]}.weight"
    _, layer, part = name.split(".")
    return f"model.transformer.blocks.{layer}.{_IN_BLOCK[part]}.weight"
