"""DiffusionGemma (google/diffusiongemma-26B-A4B-it), text only: random canvases of 256 tokens after a causal context.

Fields as in the published `config.json`; the forward pass is transformers' own (`worker/engine/canvas/`), whose
class defaults are not the published values, so that every size must be named. What steers the sampler stands in
`generation_config.json`; the constants here are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contract.errors import ModelLoadError
from worker.engine.canvas.spec import GENERATION, CanvasShape, CanvasSpec

ARCHITECTURES = ("DiffusionGemmaForBlockDiffusion",)
STOP_IDS = (1, 106, 50)
"""`<eos>`, `<turn|>` and `<|tool_response>`; the model's `config.json` lacks the last one."""

_TEXT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "num_experts",
    "top_k_experts",
    "hidden_activation",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "final_logit_softcapping",
)
_ALWAYS = {
    "attention_bias": (False,),
    "attention_k_eq_v": (True,),
    "enable_moe_block": (True,),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0, None),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": ("vision", None),
}
"""Fields of Gemma 4 with the values that this family has; other ones would be another forward pass."""


def spec(config: dict[str, Any]) -> CanvasSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    text = config["text_config"]
    generation = {name: value for name, value in (config.get(GENERATION) or {}).items() if value is not None}
    _refuse_other_forward_passes(config, text)
    return CanvasSpec(
        family="diffusion_gemma",
        decoder=CanvasShape(
            vocab_size=text["vocab_size"],
            max_positions=text["max_position_embeddings"],
            canvas_length=config["canvas_length"],
            window=text["sliding_window"],
        ),
        text={name: text[name] for name in _TEXT_FIELDS},
        stop_ids=_stop_ids(config, generation),
        denoise_steps=generation.get("max_denoising_steps", 48),
        hottest=generation.get("t_max", 0.8),
        coldest=generation.get("t_min", 0.4),
        entropy_bound=generation.get("sampler_config", {}).get("entropy_bound", 0.1),
        stable_steps=generation.get("stability_threshold", 1),
        sure_entropy=generation.get("confidence_threshold", 0.005),
    )


def _stop_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> frozenset[int]:
    """Those of `generation_config.json`; without it those of the model and the published ones."""
    if "eos_token_id" in generation:
        return _ids(generation["eos_token_id"])
    vocabulary = config["text_config"]["vocab_size"]
    return _ids(config["eos_token_id"]) | {one for one in STOP_IDS if one < vocabulary}


def _ids(ids: int | list[int]) -> frozenset[int]:
    return frozenset(ids if isinstance(ids, list) else [ids])


def _refuse_other_forward_passes(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    if "quantization_config" in config or "quantization_config" in text:
        raise ModelLoadError("config.json: quantised weights of family 'diffusion_gemma' are not supported")
    for fields in (config, text):
        for name, values in _ALWAYS.items():
            if name in fields and fields[name] not in values:
                raise ModelLoadError(f"config.json: {name} {fields[name]} is not supported; only {values[0]} is")
