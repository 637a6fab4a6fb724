"""MDLM and BD3-LM: small diffusion transformers trained on OpenWebText (kuleshov-group/mdlm-owt, bd3lm-owt-…).

Fields and weight names as published with their modeling files: MDLM sees the whole canvas, BD3-LM blocks of
`block_size`. `cond_dim` and `adaln` tell the adaptive norms; where they are left out, the published classes' defaults
hold. The vocabulary is GPT-2's and one row more, the mask, which no file names; text ends with `<|endoftext|>`. The
tokenizer is not published with them, and there is no chat template.

Their own samplers unmask at random times; here a rule chooses by confidence (see the README).
"""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError
from worker.engine.models.dit_decoder import DitConfig
from worker.engine.models.spec import Attention, ModelSpec

ARCHITECTURES = ("MDLM", "BD3LM")
END_OF_TEXT = 50256
UNSUPPORTED = ("time_conditioning", "causal")
"""Options of the published code that no published checkpoint of these families sets."""

_IN_LAYER = {
    "attention_norm": "norm1.weight",
    "qkv": "attn_qkv.weight",
    "o": "attn_out.weight",
    "mlp_norm": "norm2.weight",
    "up": "mlp.0.weight",
    "up_bias": "mlp.0.bias",
    "down": "mlp.2.weight",
    "down_bias": "mlp.2.bias",
    "modulation": "adaLN_modulation.weight",
    "modulation_bias": "adaLN_modulation.bias",
}
_OUTSIDE = {
    "embed": "vocab_embed.embedding",
    "time_in": "sigma_map.mlp.0.weight",
    "time_in_bias": "sigma_map.mlp.0.bias",
    "time_out": "sigma_map.mlp.2.weight",
    "time_out_bias": "sigma_map.mlp.2.bias",
    "norm": "output_layer.norm_final.weight",
    "modulation": "output_layer.adaLN_modulation.weight",
    "modulation_bias": "output_layer.adaLN_modulation.bias",
    "head": "output_layer.linear.weight",
    "head_bias": "output_layer.linear.bias",
}
_SPARE = frozenset({"backbone.rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max"})


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    for option in UNSUPPORTED:
        if config.get(option):
            raise ModelLoadError(f"config.json: {option} {config[option]} is not supported for MDLM and BD3-LM")
    in_blocks = config["architectures"][0] == "BD3LM"
    attention: Attention = "block_causal" if in_blocks and config.get("cross_attn", True) else "bidirectional"
    return ModelSpec(
        family="bd3lm" if in_blocks else "mdlm",
        decoder=_decoder(config, adaptive=not in_blocks or config.get("adaln", True)),
        attention=attention,
        shift=False,
        mask_id=config.get("mask_token_id") or config["vocab_size"] - 1,
        stop_ids=frozenset({config.get("eos_token_id") or END_OF_TEXT}),
        # MDLM has no blocks: its canvas is one. BD3-LM's authors let a window slide over texts longer than the
        # context; here the context is a limit, so positions never change and keys can be stored rotated.
        block_length=config["block_size"] if in_blocks else config["model_length"],
        rule="fixed_steps",
        threshold=0.9,
        tensor_name=_published_name,
        commit="fused",
        tokenizer_class="GPT2Tokenizer",
        tokenizer_home="openai-community/gpt2",
        spare_tensors=_SPARE,
    )


def _decoder(config: dict[str, Any], adaptive: bool) -> DitConfig:
    heads = config["n_heads"]
    return DitConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_dim"],
        intermediate_size=4 * config["hidden_dim"],
        layers=config["n_blocks"],
        heads=heads,
        kv_heads=heads,
        head_dim=config["hidden_dim"] // heads,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_positions=config["model_length"],
        condition_size=config.get("cond_dim", 129) if adaptive else 0,
    )


def _published_name(name: str) -> str:
    """`layers.3.qkv` -> `backbone.blocks.3.attn_qkv.weight`."""
    if name in _OUTSIDE:
        return f"backbone.{_OUTSIDE[name]}"
    _, layer, part = name.split(".")
    return f"backbone.blocks.{layer}.{_IN_LAYER[part]}"
