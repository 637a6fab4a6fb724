"""A tiny random checkpoint in DiffusionGemma's published layout: layers of both kinds, experts, two sets of scalars."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import checkpoints
from tests.checkpoints import STOP, TURN, VOCABULARY

CANVAS = 16
WINDOW = 24
HIDDEN, INTERMEDIATE, EXPERT, EXPERTS, HEADS = 32, 24, 16, 6, 4
LAYERS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
HEAD_DIM = {"sliding_attention": 8, "full_attention": 16}
KV_HEADS = {"sliding_attention": 2, "full_attention": 1}
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 8,
}
GENERATION = {
    "max_new_tokens": CANVAS,
    "max_denoising_steps": 12,
    "t_max": 0.8,
    "t_min": 0.4,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 2.0},
    "stability_threshold": 1,
    "confidence_threshold": 0.1,  # weights this random are never as sure as published ones must be
    "eos_token_id": [STOP, TURN],
    "pad_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)


def diffusion_gemma(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write the checkpoint to `folder`, a sampler that is short and easily satisfied with it; returns the folder."""
    checkpoints._write(folder, config(max_positions), random_weights(seed), tokenizer, chat_template)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION), encoding="utf-8")
    if tokenizer and chat_template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


def config(max_positions: int = 512) -> dict[str, Any]:
    """`config.json` with the published fields."""
    text = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS["sliding_attention"],
        "num_global_key_value_heads": KV_HEADS["full_attention"],
        "head_dim": HEAD_DIM["sliding_attention"],
        "global_head_dim": HEAD_DIM["full_attention"],
        "num_experts": EXPERTS,
        "top_k_experts": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        },
        "sliding_window": WINDOW,
        "layer_types": list(LAYERS),
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": CANVAS,
        "tie_word_embeddings": True,
        "eos_token_id": STOP,
        "image_token_id": 3,
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", **VISION},
    }


def random_weights(seed: int) -> dict[str, Tensor]:
    """All tensors under their published names, float32; of the vision tower only what shows that it is left out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * gain / math.sqrt(shape[-1])

    def near(value: float, *shape: int) -> Tensor:
        return value * (1.0 + 0.1 * torch.randn(*shape, generator=generator))

    embedding = normal(VOCABULARY, HIDDEN, gain=6.0)
    embedding[STOP] *= 1.2  # so that answers of a few dozen tokens often reach it
    weights = {
        "model.decoder.embed_tokens.weight": embedding,
        "model.decoder.norm.weight": near(1.0, HIDDEN),
        "model.decoder.self_conditioning.pre_norm.weight": near(1.0, HIDDEN),
        "model.decoder.self_conditioning.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
        "model.decoder.self_conditioning.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
        "model.decoder.self_conditioning.down_proj.weight": normal(HIDDEN, INTERMEDIATE, gain=0.5),
        "model.encoder.vision_tower.std_bias": torch.zeros(16),
        "model.encoder.embed_vision.embedding_projection.weight": normal(HIDDEN, 16),
    }
    for number, kind in enumerate(LAYERS):
        q, kv = HEADS * HEAD_DIM[kind], KV_HEADS[kind] * HEAD_DIM[kind]
        layer = {
            "self_attn.q_proj.weight": normal(q, HIDDEN),
            "self_attn.k_proj.weight": normal(kv, HIDDEN),
            "self_attn.o_proj.weight": normal(HIDDEN, q, gain=2.0),
            "self_attn.q_norm.weight": near(1.0, HEAD_DIM[kind]),
            "self_attn.k_norm.weight": near(0.5, HEAD_DIM[kind]),
            "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
            "experts.gate_up_proj": normal(EXPERTS, 2 * EXPERT, HIDDEN),
            "experts.down_proj": normal(EXPERTS, HIDDEN, EXPERT),
            "router.proj.weight": normal(EXPERTS, HIDDEN, gain=8.0 * math.sqrt(HIDDEN)),
            "router.scale": near(1.0, HIDDEN),
            "router.per_expert_scale": near(1.0, EXPERTS),
            "layer_scalar": near(0.8, 1),
        }
        layer |= {f"{norm}.weight": near(0.35 if norm.startswith("post_") else 1.0, HIDDEN) for norm in NORMS}
        if kind == "sliding_attention":  # full layers take their raw keys as values
            layer["self_attn.v_proj.weight"] = normal(kv, HIDDEN)
        weights |= {f"model.decoder.layers.{number}.{part}": weight for part, weight in layer.items()}
        weights[f"model.encoder.language_model.layers.{number}.layer_scalar"] = near(1.2, 1)
    return weights
