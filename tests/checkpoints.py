"""Tiny random checkpoints in the published layouts: made in milliseconds, loaded like real ones.

The weights are scaled so that the models behave like trained ones where it matters: some predictions are sure and
some are not, neighbours and positions change them, and some answers reach the stop token.
"""

from __future__ import annotations

import json
import math
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
WIDE_HEAD = 24  # of models whose heads together are wider than the residual stream
ROPE_THETA = 10_000.0
NORM_EPS = 1e-5

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
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": NORM_EPS,
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
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDE_HEAD,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _write(folder, config, qwen3_weights(seed), tokenizer, chat_template)


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
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _write(folder, config, qwen2_weights(seed), tokenizer, chat_template)


def qwen2_weights(seed: int) -> dict[str, Tensor]:
    """All weights under Qwen2's names: biases on queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(seed)
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = 0.1 * torch.randn(weights[name].shape[0], generator=generator)
        weights[name.removesuffix("weight") + "bias"] = bias
    return weights


def qwen3_weights(seed: int) -> dict[str, Tensor]:
    """All weights under Qwen3's names: heads of `WIDE_HEAD`, each query and key normed."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(seed, WIDE_HEAD)
    for number in range(LAYERS):
        for norm in ("q_norm", "k_norm"):
            # Normed queries and keys have lost their gain; the weight of the norm brings some of it back.
            weight = 1.6 + 0.16 * torch.randn(WIDE_HEAD, generator=generator)
            weights[f"model.layers.{number}.self_attn.{norm}.weight"] = weight
    return weights


def random_weights(seed: int, head_dim: int = HIDDEN // HEADS) -> dict[str, Tensor]:
    """All weights under Llama's names, float32; the head is a copy of the embedding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)

    def norm_weight() -> Tensor:
        return 1.0 + 0.1 * torch.randn(HIDDEN, generator=generator)

    q, kv = HEADS * head_dim, KV_HEADS * head_dim
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
    weights["lm_head.weight"] = embedding.clone()
    return weights


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
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(SPECIALS[number], special=True) for number in sorted(SPECIALS)])
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[STOP]}
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
