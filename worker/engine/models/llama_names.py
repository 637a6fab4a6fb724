"""Names and config fields that every Llama-shaped family shares."""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError
from worker.engine.models.spec import DecoderConfig

_IN_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
_OUTSIDE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}


def llama_name(name: str) -> str:
    """`layers.3.q` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part = name.split(".", 2)
    inside = f"mlp.{part}_proj.weight" if part.startswith("experts.") else _IN_LAYER[part]
    return f"model.layers.{layer}.{inside}"


def llama_decoder(config: dict[str, Any]) -> DecoderConfig:
    """Decoder shapes from Llama's config fields, as transformers writes them (before and after version 5)."""
    rope = config.get("rope_parameters") or {}
    _refuse_scaled_rope(rope | (config.get("rope_scaling") or {}))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    part = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=config["rms_norm_eps"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        max_positions=config["max_position_embeddings"],
        tied_head=bool(config.get("tie_word_embeddings", False)),
        rotary_dim=None if part == 1 else int(head_dim * part),
    )


def _refuse_scaled_rope(rope: dict[str, Any]) -> None:
    """Without its scaling such a model would run and answer worse, and nobody would know why."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelLoadError(f"config.json: rope type '{kind}' is not supported; only 'default' is")


def require(config: dict[str, Any], family: str, **supported: Any) -> None:
    """Refuse fields whose other values would change the forward pass; one that is missing or null is as supported."""
    for field, value in supported.items():
        if config.get(field, value) not in (None, value):
            raise ModelLoadError(f"config.json: {field} {config[field]} is not supported for family '{family}'")


def stop_ids(config: dict[str, Any], *more: int) -> frozenset[int]:
    """The ids that end a text: `eos_token_id`, one or several, and those of `more` that the vocabulary holds."""
    ids = config["eos_token_id"]
    return frozenset(ids if isinstance(ids, list) else [ids]) | {one for one in more if one < config["vocab_size"]}
