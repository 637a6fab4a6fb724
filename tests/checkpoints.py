"""Tiny random checkpoints in the published layouts: made in milliseconds, loaded like real ones.

The weights are scaled so that the models behave like trained ones where it matters: some predictions are sure and
some are not, neighbours and positions change them, and some answers reach the stop token.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

STOP, MASK, TURN = 256, 257, 258  # ids 0 … 255 are the bytes
VOCABULARY = 259
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
EXPERTS, TOP_K, EXPERT_INTERMEDIATE = 16, 3, 24
ROPE_THETA = 10_000.0
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """What differs between the Llama-shaped models that others are made from."""

    head_dim: int = HIDDEN // HEADS
    kv_heads: int = KV_HEADS
    qkv_bias: float = 0.0  # standard deviation of the biases; 0: there are none
    qk_norm: bool = False
    yarn: bool = False


LLAMA = Shape()
QWEN2 = Shape(qkv_bias=0.2)
QWEN2_CALM = Shape(qkv_bias=0.1)  # with blocks of its own, where float32's rounding grows faster
QWEN3 = Shape(head_dim=24, qk_norm=True)  # heads * head_dim is not the hidden size, as published
MINISTRAL3 = Shape(head_dim=24, yarn=True)
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""As published with the instruct model, but for the original context, which answers of a test must leave."""

LLAMA_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": NORM_EPS,
}
"""The fields of a config that most layouts name as Llama's does."""

SPECIALS = {STOP: "<|end|>", MASK: "<|mask|>", TURN: "<|turn|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def llama_block(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a block-diffusion Llama (causal context, blocks of 4, tied head) to `folder`; returns it."""
    config = {
        "architectures": ["LlamaForBlockDiffusion"],
        "model_type": "llama",
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "block_length": 4,
        "denoise_rule": "left_to_right",
        "denoise_threshold": 0.9,
        **LLAMA_SIZES,
        "head_dim": HIDDEN // HEADS,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }
    weights = random_weights(seed)
    del weights["lm_head.weight"]
    return _write(folder, config, weights, tokenizer, chat_template)


def llada(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in LLaDA's layout (untied head) to `folder`; returns it."""
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
        "d_model": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "n_layers": LAYERS,
        "mlp_hidden_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "embedding_size": VOCABULARY,
        "max_sequence_length": max_positions,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "weight_tying": False,
    }
    weights = {_llada_name(name): weight for name, weight in random_weights(seed).items()}
    return _write(folder, config, weights, tokenizer, chat_template)


def dream(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in Dream's layout (shifted, biases, untied head) to `folder`; returns it.

    Its tokenizer is Qwen2's two files under a class name of its own.
    """
    config = {
        "architectures": ["DreamModel"],
        "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
        "model_type": "Dream",
        "mask_token_id": MASK,
        "bos_token_id": STOP,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
        "hidden_act": "silu",
        **LLAMA_SIZES,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "use_cache": False,
        "sliding_window": None,
    }
    _write(folder, config, random_weights(seed, QWEN2), False, False)
    if tokenizer:
        _write_dream_tokenizer(folder, chat_template)
    return folder


def a2d_qwen3(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in A2D Qwen3's layout (norms of queries and keys, tied head); returns `folder`.

    Published ones leave the mask id to the family; a vocabulary this small cannot hold it.
    """
    config = {
        "architectures": ["A2DQwen3LMHeadModel"],
        "model_type": "a2d-qwen3",
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "attention_bias": False,
        "hidden_act": "silu",
        **LLAMA_SIZES,
        "head_dim": QWEN3.head_dim,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }
    weights = random_weights(seed, QWEN3)
    del weights["lm_head.weight"]
    return _write(folder, config, weights, tokenizer, chat_template)


def illada(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in iLLaDA's layout (tied head, stored as well) to `folder`; returns it."""
    config = {
        "architectures": ["ILLaDAForCausalLM"],
        "model_type": "illada",
        "mask_token_id": MASK,  # published ones leave it to the family, whose id is a byte here
        "eos_token_id": STOP,
        "hidden_act": "silu",
        "layer_norm_eps": None,
        "attention_bias": False,
        "mlp_bias": False,
        **LLAMA_SIZES,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }
    return _write(folder, config, random_weights(seed), tokenizer, chat_template)


def sdar(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a block-causal model in SDAR's layout (Qwen3's, untied head, heads wider than the model) to `folder`.

    The mask id, which published configs leave out, is named as SDAR's training copy names it: the family's own is
    beyond this vocabulary.
    """
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "mask_token_id": MASK,
        "bos_token_id": STOP,
        "eos_token_id": STOP,
        **LLAMA_SIZES,
        "head_dim": QWEN3.head_dim,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _write(folder, config, random_weights(seed, QWEN3), tokenizer, chat_template)


def fast_dllm_v2(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a shifted block-causal model in Fast-dLLM v2's layout (Qwen2's, blocks of 32) to `folder`.

    The mask id is named for the same reason as `sdar`'s.
    """
    config = {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "mask_token_id": MASK,
        "bd_size": 32,
        "bos_token_id": STOP,
        "eos_token_id": STOP,
        **LLAMA_SIZES,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _write(folder, config, random_weights(seed, QWEN2_CALM), tokenizer, chat_template)


def sdar_moe(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a model in the layout of SDAR's mixture of experts (Qwen3-MoE's) to `folder`; returns it."""
    config = {
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "mask_token_id": MASK,
        "bos_token_id": STOP,
        "eos_token_id": STOP,
        **LLAMA_SIZES,
        "head_dim": QWEN3.head_dim,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    weights = random_expert_weights(seed, QWEN3, down_gain=4.0)
    return _write(folder, config, weights, tokenizer, chat_template)


def llada_moe(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in LLaDA-MoE's layout to `folder`; returns it.

    As many key heads as query heads, and no field for their width. Its code ignores `norm_topk_prob` and the fields of
    the router, so they say here what it does not do.
    """
    config = {
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "dense_intermediate_size": INTERMEDIATE,
        "expert_intermediate_size": EXPERT_INTERMEDIATE,
        "shared_expert_intermediate_size": None,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_layer_freq": [1] * LAYERS,
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": False,
        "routed_scaling_factor": 3.0,
        "router_num_group": 4,
        "router_topk_group": 2,
        "qk_layernorm": True,
        "clip_qkv": None,
        "attention_bias": False,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "partial_rotary_factor": 1,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
    }
    shape = Shape(kv_heads=HEADS, qk_norm=True)
    return _write(folder, config, random_expert_weights(seed, shape, down_gain=7.0), tokenizer, chat_template)


def llada2(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a block-causal model in LLaDA2's layout to `folder`: a dense first layer, then experts; returns it.

    One weight for queries, keys and values, half of a head rotated, experts in four groups and one for all. Published
    configs have neither mask nor stop id, which are beyond this vocabulary.
    """
    config = {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
        **LLAMA_SIZES,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "head_dim": QWEN3.head_dim,
        "first_k_dense_replace": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "norm_head": False,
        "norm_softmax": False,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "partial_rotary_factor": 0.5,
        "rotary_dim": QWEN3.head_dim // 2,
        "max_position_embeddings": max_positions,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    weights = _fused(random_expert_weights(seed, QWEN3, first=1, down_gain=2.0)) | _llada2_extras(seed)
    return _write(folder, config, {_llada2_name(name): w for name, w in weights.items()}, tokenizer, chat_template)


def dream_reasoner(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a block-causal model in DreamReasoner's layout (Qwen3's, blocks of 32, Dream's tokenizer) to `folder`."""
    config = {
        "architectures": ["DreamForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModelForCausalLM": "modeling_dream.DreamForCausalLM",
        },
        "model_type": "Dream",
        "mask_token_id": MASK,
        "block_size": 32,
        **_llama_fields(QWEN3, max_positions),
    }
    _write(folder, config, random_weights(seed, QWEN3), False, False)
    if tokenizer:
        _write_dream_tokenizer(folder, chat_template)
    return folder


def stable_diffcoder(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a block-causal model in Stable-DiffCoder's layout (Llama's, by `model_type` too) to `folder`.

    The mask id, which published configs leave out, is a byte here, so it is named.
    """
    config = {
        "architectures": ["StableDiffcoderForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
        "model_type": "llama",
        "mask_token_id": MASK,
        "mlp_bias": False,
        **_llama_fields(LLAMA, max_positions),
        "head_dim": None,
    }
    return _write(folder, config, random_weights(seed), tokenizer, chat_template)


def nemotron(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a model in Nemotron-Labs-Diffusion's layout (Ministral 3's under other names, YaRN) to `folder`."""
    config = {
        "architectures": ["NemotronLabsDiffusionModel"],
        "auto_map": {
            "AutoConfig": "configuration_nemotron_labs_diffusion.NemotronLabsDiffusionConfig",
            "AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel",
        },
        "model_type": "nemotron_labs_diffusion",
        "mask_token_id": MASK,
        "block_size": 32,
        "dlm_paradigm": "bidirectional",
        "mlp_bias": False,
        "sliding_window": None,
        **_llama_fields(MINISTRAL3, max_positions),
    }
    weights = {
        name.replace("model.", "encoder.", 1).replace("lm_head.", "diffusion_head."): weight
        for name, weight in random_weights(seed, MINISTRAL3).items()
    }
    return _write(folder, config, weights, tokenizer, chat_template)


def wedlm(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat_template: bool = False,
    max_positions: int = 512,
    shape: Shape = QWEN3,
) -> Path:
    """Write a causal model in WeDLM's layout, that of the 8B or (`shape` QWEN2) of the 7B, to `folder`."""
    config = {
        "architectures": ["WeDLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_wedlm.WeDLMConfig",
            "AutoModelForCausalLM": "modeling_wedlm.WeDLMForCausalLM",
        },
        "model_type": "wedlm",
        "mask_token_id": MASK,
        **_llama_fields(shape, max_positions),
        "attention_bias": bool(shape.qkv_bias),
        "qk_norm": shape.qk_norm,
    }
    return _write(folder, config, random_weights(seed, shape), tokenizer, chat_template)


def rope_parameters(shape: Shape) -> dict[str, Any]:
    """As transformers writes them."""
    return {"rope_type": "default", "rope_theta": ROPE_THETA, **(YARN if shape.yarn else {})}


def _llama_fields(shape: Shape, max_positions: int) -> dict[str, Any]:
    return {
        "bos_token_id": STOP,
        "eos_token_id": STOP,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": shape.head_dim,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": rope_parameters(shape),
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def random_weights(seed: int, shape: Shape = LLAMA) -> dict[str, Tensor]:
    """All weights under Llama's names, float32; the head is a copy of the embedding."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(_normal, generator)

    def norm_weight() -> Tensor:
        return 1.0 + 0.1 * torch.randn(HIDDEN, generator=generator)

    q, kv = HEADS * shape.head_dim, shape.kv_heads * shape.head_dim
    embedding = normal(VOCABULARY, HIDDEN, gain=6.0)
    embedding[STOP] *= 1.6  # so that answers of a few dozen tokens often reach it
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm_weight()}
    for number in range(LAYERS):
        layer = {
            "input_layernorm": norm_weight(),
            "post_attention_layernorm": norm_weight(),
            "self_attn.q_proj": normal(q, HIDDEN, gain=2.5),
            "self_attn.k_proj": normal(kv, HIDDEN, gain=2.5),
            "self_attn.v_proj": normal(kv, HIDDEN, gain=3.0),
            "self_attn.o_proj": normal(HIDDEN, q, gain=3.0),
            "mlp.gate_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": normal(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": normal(HIDDEN, INTERMEDIATE, gain=4.0),
        }
        weights |= {f"model.layers.{number}.{part}.weight": weight for part, weight in layer.items()}
        weights |= {f"model.layers.{number}.self_attn.{part}": w for part, w in _extras(seed, number, shape).items()}
    weights["lm_head.weight"] = embedding.clone()
    return weights


def _normal(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    """(rows, columns), scaled so that a product with it keeps `gain` times the size of what goes in."""
    return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)


def _extras(seed: int, number: int, shape: Shape) -> dict[str, Tensor]:
    """A layer's weights that only some shapes have, drawn apart: the others stay what they are without them.

    Attention is sharp, but not so sharp that float32's rounding grows past 1e-4.
    """
    generator = torch.Generator().manual_seed(1000 * seed + number + 1)
    extras: dict[str, Tensor] = {}
    if shape.qkv_bias:
        lengths = {"q_proj": HEADS * shape.head_dim, "k_proj": shape.kv_heads * shape.head_dim}
        for part, length in (lengths | {"v_proj": lengths["k_proj"]}).items():
            extras[f"{part}.bias"] = shape.qkv_bias * torch.randn(length, generator=generator)
    if shape.qk_norm:
        for part in ("q_norm", "k_norm"):
            extras[f"{part}.weight"] = 1.7 + 0.3 * torch.randn(shape.head_dim, generator=generator)
    return extras


def random_expert_weights(seed: int, shape: Shape, *, first: int = 0, down_gain: float) -> dict[str, Tensor]:
    """`random_weights` with experts in place of the MLPs from layer `first` on, one tensor for each projection."""
    weights = random_weights(seed, shape)
    normal = partial(_normal, torch.Generator().manual_seed(1000 * seed + 500))
    for number in range(first, LAYERS):
        mlp = f"model.layers.{number}.mlp"
        for part in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{mlp}.{part}.weight"]
        weights[f"{mlp}.gate.weight"] = normal(EXPERTS, HIDDEN, gain=2.0)
        for expert in range(EXPERTS):
            weights |= {
                f"{mlp}.experts.{expert}.gate_proj.weight": normal(EXPERT_INTERMEDIATE, HIDDEN),
                f"{mlp}.experts.{expert}.up_proj.weight": normal(EXPERT_INTERMEDIATE, HIDDEN),
                f"{mlp}.experts.{expert}.down_proj.weight": normal(HIDDEN, EXPERT_INTERMEDIATE, gain=down_gain),
            }
    return weights


def _fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All query heads, then all key heads, then all value heads in one weight."""
    fused = {name: weight for name, weight in weights.items() if ".self_attn." not in name or "norm" in name}
    for number in range(LAYERS):
        prefix = f"model.layers.{number}"
        parts = [weights[f"{prefix}.self_attn.{part}_proj.weight"] for part in "qkv"]
        fused[f"{prefix}.attention.query_key_value.weight"] = torch.cat(parts)
        fused[f"{prefix}.attention.dense.weight"] = weights[f"{prefix}.self_attn.o_proj.weight"]
    return fused


def _llada2_extras(seed: int) -> dict[str, Tensor]:
    """What LLaDA2's layers with experts have besides: a bias for the choice, and an expert for all."""
    generator = torch.Generator().manual_seed(1000 * seed + 700)
    normal = partial(_normal, generator)
    extras: dict[str, Tensor] = {}
    for number in range(1, LAYERS):
        mlp = f"model.layers.{number}.mlp"
        extras |= {
            f"{mlp}.gate.expert_bias": 0.3 * torch.randn(EXPERTS, generator=generator),
            f"{mlp}.shared_experts.gate_proj.weight": normal(EXPERT_INTERMEDIATE, HIDDEN),
            f"{mlp}.shared_experts.up_proj.weight": normal(EXPERT_INTERMEDIATE, HIDDEN),
            f"{mlp}.shared_experts.down_proj.weight": normal(HIDDEN, EXPERT_INTERMEDIATE, gain=2.0),
        }
    return extras


def _llada2_name(name: str) -> str:
    name = name.replace("model.embed_tokens", "model.word_embeddings")
    return name.replace("self_attn.q_norm", "attention.query_layernorm").replace(
        "self_attn.k_norm", "attention.key_layernorm"
    )


def _llada_name(name: str) -> str:
    outside = {"model.embed_tokens": "wte", "model.norm": "ln_f", "lm_head": "ff_out"}
    inside = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ff_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    }
    stem = name.removesuffix(".weight")
    if stem in outside:
        return f"model.transformer.{outside[stem]}.weight"
    number, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"model.transformer.blocks.{number}.{inside[part]}.weight"


def modernbert(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in ModernBERT's layout (local layers, tied head with a bias) to `folder`.

    As published, texts end with the padding and not with `eos_token_id`; the mask id is named for the same reason as
    `sdar`'s. Layers 0 and 3 see everything, 1 and 2 a window, so that no shifted pattern is the same.
    """
    config = {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "mask_token_id": MASK,
        "bos_token_id": TURN,
        "cls_token_id": TURN,
        "eos_token_id": TURN,
        "sep_token_id": TURN,
        "pad_token_id": STOP,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "max_position_embeddings": max_positions,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": ROPE_THETA,
        "norm_eps": NORM_EPS,
        "layer_norm_eps": NORM_EPS,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "tie_word_embeddings": True,
    }
    return _write(folder, config, modernbert_weights(seed, layers=4), tokenizer, chat_template)


def modernbert_weights(seed: int, layers: int) -> dict[str, Tensor]:
    """All weights under ModernBERT's names, float32; the head's matrix is the embedding."""
    draw = Draw(seed)
    embedding = draw.matrix(VOCABULARY, HIDDEN, gain=4.0)
    embedding[STOP] *= 1.3
    weights = {
        "model.embeddings.tok_embeddings.weight": embedding,
        "model.embeddings.norm.weight": draw.around_one(HIDDEN),
        "model.final_norm.weight": draw.around_one(HIDDEN),
        "head.dense.weight": draw.matrix(HIDDEN, HIDDEN, gain=3.0),
        "head.norm.weight": draw.around_one(HIDDEN),
        "decoder.bias": draw.vector(VOCABULARY, 0.5),
    }
    for number in range(layers):
        layer = {
            "attn.Wqkv": torch.cat([draw.matrix(HIDDEN, HIDDEN, gain) for gain in (1.6, 1.6, 2.5)]),
            "attn.Wo": draw.matrix(HIDDEN, HIDDEN, gain=2.5),
            "mlp_norm": draw.around_one(HIDDEN),
            "mlp.Wi": draw.matrix(2 * INTERMEDIATE, HIDDEN, gain=1.5),
            "mlp.Wo": draw.matrix(HIDDEN, INTERMEDIATE, gain=2.5),
        }
        if number:
            layer["attn_norm"] = draw.around_one(HIDDEN)
        weights |= {f"model.layers.{number}.{part}.weight": weight for part, weight in layer.items()}
    return weights


def bert(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional model in BERT's layout (learned positions, tied head with a bias) to `folder`.

    Texts end with the padding; the mask id is named for the same reason as `sdar`'s.
    """
    config = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "mask_token_id": MASK,
        "pad_token_id": STOP,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": max_positions,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "use_cache": True,
    }
    return _write(folder, config, bert_weights(seed, max_positions), tokenizer, chat_template)


def bert_weights(seed: int, max_positions: int) -> dict[str, Tensor]:
    """All weights under BERT's names, float32; the head's matrix is the embedding."""
    draw = Draw(seed)
    embedding = draw.matrix(VOCABULARY, HIDDEN, gain=5.0)
    embedding[STOP] *= 1.3
    weights = {
        "bert.embeddings.word_embeddings.weight": embedding,
        "bert.embeddings.position_embeddings.weight": draw.matrix(max_positions, HIDDEN, gain=6.0),
        "bert.embeddings.token_type_embeddings.weight": draw.matrix(2, HIDDEN, gain=3.0),
        "cls.predictions.bias": draw.vector(VOCABULARY, 0.5),
    }
    norms, products = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"], {}
    products["cls.predictions.transform.dense"] = draw.matrix(HIDDEN, HIDDEN, gain=3.0)
    for layer in (f"bert.encoder.layer.{number}." for number in range(LAYERS)):
        norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
        for part, gain in {"query": 2.2, "key": 2.2, "value": 3.0}.items():
            products[f"{layer}attention.self.{part}"] = draw.matrix(HIDDEN, HIDDEN, gain)
        products[f"{layer}attention.output.dense"] = draw.matrix(HIDDEN, HIDDEN, gain=3.0)
        products[f"{layer}intermediate.dense"] = draw.matrix(INTERMEDIATE, HIDDEN, gain=1.5)
        products[f"{layer}output.dense"] = draw.matrix(HIDDEN, INTERMEDIATE, gain=3.0)
    for name in norms:
        weights |= {f"{name}.weight": draw.around_one(HIDDEN), f"{name}.bias": draw.vector(HIDDEN, 0.1)}
    for name, matrix in products.items():
        weights |= {f"{name}.weight": matrix, f"{name}.bias": draw.vector(matrix.shape[0], 0.1)}
    return weights


def mdlm(
    folder: Path, *, seed: int = 0, tokenizer: bool = True, chat_template: bool = False, max_positions: int = 512
) -> Path:
    """Write a bidirectional diffusion transformer in MDLM's layout to `folder`, with GPT-2's two tokenizer files.

    Ids of mask and end are named, which published configs leave out: theirs are beyond this vocabulary.
    """
    return _write_dit(folder, _dit_config("MDLM", max_positions), seed, tokenizer, chat_template)


def bd3lm(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat_template: bool = False,
    max_positions: int = 512,
    adaln: bool = True,
) -> Path:
    """Write a block-causal diffusion transformer in BD3-LM's layout (blocks of 4) to `folder`, as `mdlm` does."""
    config = _dit_config("BD3LM", max_positions) | {
        "adaln": adaln,
        "attn_backend": "flex",
        "block_size": 4,
        "causal": False,
        "cross_attn": True,
        "sampling_eps_max": 0.999,
        "sampling_eps_min": 0.001,
        "var_min": True,
    }
    return _write_dit(folder, config, seed, tokenizer, chat_template)


def _dit_config(name: str, max_positions: int) -> dict[str, Any]:
    module = f"modeling_{name.lower()}.{name}"
    return {
        "architectures": [name],
        "auto_map": {"AutoConfig": f"configuration_{name.lower()}.{name}Config", "AutoModelForMaskedLM": module},
        "model_type": name.lower(),
        "mask_token_id": MASK,
        "eos_token_id": STOP,
        "cond_dim": 24,
        "dropout": 0.1,
        "hidden_dim": HIDDEN,
        "model_length": max_positions,
        "n_blocks": LAYERS,
        "n_heads": HEADS,
        "return_dict": False,
        "time_conditioning": False,
        "vocab_size": VOCABULARY,
    }


def _write_dit(folder: Path, config: dict[str, Any], seed: int, tokenizer: bool, chat_template: bool) -> Path:
    weights = dit_weights(seed, adaln=config.get("adaln", True))
    if config.get("var_min"):
        weights |= {name: torch.tensor(config[name]) for name in ("sampling_eps_min", "sampling_eps_max")}
    _write(folder, config, weights, False, False)
    if tokenizer:
        end = {"<|endoftext|>": STOP}
        (folder / "vocab.json").write_text(json.dumps(_bytes() | end), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        _write_tokenizer_config(folder, {"model_max_length": 1024}, chat_template)
    return folder


def dit_weights(seed: int, adaln: bool = True) -> dict[str, Tensor]:
    """All weights under the published names, float32; gates lie around one, other modulations around zero."""
    draw, size = Draw(seed), 24
    one = torch.ones(HIDDEN)
    embedding = draw.matrix(VOCABULARY, HIDDEN, gain=3.0)
    head = draw.matrix(VOCABULARY, HIDDEN, gain=4.0)
    head[STOP] *= 1.3
    weights = {
        "vocab_embed.embedding": embedding,
        "rotary_emb.inv_freq": 10_000.0 ** (-torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS)),
        "output_layer.norm_final.weight": draw.around_one(HIDDEN),
        "output_layer.linear.weight": head,
        "output_layer.linear.bias": draw.vector(VOCABULARY, 0.5),
    }
    for number in range(LAYERS):
        layer = {
            "norm1.weight": draw.around_one(HIDDEN),
            "attn_qkv.weight": draw.matrix(3 * HIDDEN, HIDDEN, gain=3.0),
            "attn_out.weight": draw.matrix(HIDDEN, HIDDEN, gain=3.0),
            "norm2.weight": draw.around_one(HIDDEN),
            "mlp.0.weight": draw.matrix(4 * HIDDEN, HIDDEN),
            "mlp.0.bias": draw.vector(4 * HIDDEN, 0.3),
            "mlp.2.weight": draw.matrix(HIDDEN, 4 * HIDDEN, gain=2.0),
            "mlp.2.bias": draw.vector(HIDDEN, 0.3),
        }
        if adaln:
            layer["adaLN_modulation.weight"] = draw.matrix(6 * HIDDEN, size, gain=0.4)
            gates = torch.cat([0 * one, 0 * one, one] * 2)
            layer["adaLN_modulation.bias"] = gates + draw.vector(6 * HIDDEN, 0.2)
        weights |= {f"blocks.{number}.{part}": weight for part, weight in layer.items()}
    if adaln:
        weights |= {
            "sigma_map.mlp.0.weight": draw.matrix(size, 256, gain=2.0),
            "sigma_map.mlp.0.bias": draw.vector(size, 0.5),
            "sigma_map.mlp.2.weight": draw.matrix(size, size, gain=2.0),
            "sigma_map.mlp.2.bias": draw.vector(size, 0.5),
            "output_layer.adaLN_modulation.weight": draw.matrix(2 * HIDDEN, size, gain=0.4),
            "output_layer.adaLN_modulation.bias": draw.vector(2 * HIDDEN, 0.2),
        }
    return {f"backbone.{name}": weight for name, weight in weights.items()}


class Draw:
    """Random weights of one seed, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """What it makes of inputs of variance 1 has the standard deviation `gain`."""
        return torch.randn(rows, columns, generator=self._generator) * gain / math.sqrt(columns)

    def vector(self, length: int, deviation: float) -> Tensor:
        return deviation * torch.randn(length, generator=self._generator)

    def around_one(self, length: int) -> Tensor:
        return 1.0 + self.vector(length, 0.1)


def _write(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: bool, chat_template: bool
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if tokenizer:
        _write_tokenizer(folder, chat_template)
    return folder


def _write_tokenizer(folder: Path, chat_template: bool) -> None:
    """One token per byte, and the special tokens."""
    made = Tokenizer(BPE(vocab=_bytes(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(SPECIALS[number], special=True) for number in sorted(SPECIALS)])
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[STOP]}
    _write_tokenizer_config(folder, settings, chat_template)


def _write_dream_tokenizer(folder: Path, chat_template: bool) -> None:
    (folder / "vocab.json").write_text(json.dumps(_bytes()), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {
            str(number): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for number, text in SPECIALS.items()
        },
        "bos_token": SPECIALS[STOP],
        "eos_token": SPECIALS[STOP],
        "mask_token": SPECIALS[MASK],
        "pad_token": SPECIALS[STOP],
        "unk_token": SPECIALS[STOP],
    }
    _write_tokenizer_config(folder, settings, chat_template)


def _bytes() -> dict[str, int]:
    return {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def _write_tokenizer_config(folder: Path, settings: dict[str, Any], chat_template: bool) -> None:
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
