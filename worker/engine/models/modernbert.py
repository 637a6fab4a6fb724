"""ModernBERT chat: an encoder that was tuned to denoise answers (dllm-hub/ModernBERT-base-chat-v0.1 and -large-).

Weights and fields are those of answerdotai/ModernBERT, in either spelling: `global_attn_every_n_layers` and two theta
fields, or `layer_types` and `rope_parameters` of transformers 5. The mask `[MASK]` is 50284 and in no field. Answers
were padded with `[PAD]` in training and end with it, not with the `eos_token_id` of the configuration. The recipe's
chat template is not part of the tokenizer; its turns end with a text of several tokens. Not shifted.

Any ModernBERT has this architecture, also one that was never tuned to answer: it is loaded, and denoises as well as
an encoder does that saw 30% masks in training.
"""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError
from worker.engine.models.modernbert_decoder import ModernBertConfig
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("ModernBertForMaskedLM",)
PADDING, MASK_ID = 50283, 50284
PUBLISHED = {
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
}
"""Options of the published code that all published checkpoints set alike; absent, they have these values too."""
GLOBAL, LOCAL = "full_attention", "sliding_attention"
END_OF_ANSWER = "[/Answer]"
CHAT_TEMPLATE = (
    "{% set names = {'system': 'SYS', 'user': 'Question', 'assistant': 'Answer'} %}"
    "{% for message in messages %}[{{ names[message.role] }}]\n{{ message.content | trim }}\n"
    "[/{{ names[message.role] }}]\n\n{% endfor %}"
    "{% if add_generation_prompt %}[Answer]\n{% endif %}"
)

_IN_LAYER = {
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "o": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
}
_OUTSIDE = {
    "embed": "model.embeddings.tok_embeddings.weight",
    "embed_norm": "model.embeddings.norm.weight",
    "norm": "model.final_norm.weight",
    "transform": "head.dense.weight",
    "transform_norm": "head.norm.weight",
    "head": "decoder.weight",
    "head_bias": "decoder.bias",
}


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    for option, value in PUBLISHED.items():
        if config.get(option, value) != value:
            raise ModelLoadError(f"config.json: {option} {config[option]} is not supported for family 'modernbert'")
    padding = config.get("pad_token_id")
    return ModelSpec(
        family="modernbert",
        decoder=_decoder(config),
        attention="bidirectional",
        shift=False,
        mask_id=config.get("mask_token_id") or MASK_ID,
        stop_ids=frozenset({PADDING if padding is None else padding}),
        block_length=32,
        rule="threshold",
        threshold=0.9,
        tensor_name=_published_name,
        chat_template=CHAT_TEMPLATE,
        end_of_answer=END_OF_ANSWER,
    )


def _decoder(config: dict[str, Any]) -> ModernBertConfig:
    heads = config["num_attention_heads"]
    return ModernBertConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_dim=config["hidden_size"] // heads,
        norm_eps=config["norm_eps"],
        rope_theta=_theta(config, GLOBAL),
        local_rope_theta=_theta(config, LOCAL),
        max_positions=config["max_position_embeddings"],
        tied_head=config.get("tie_word_embeddings", True),
        window=config["local_attention"] // 2,
        local_layers=_local_layers(config),
    )


def _theta(config: dict[str, Any], kind: str) -> float:
    rope = (config.get("rope_parameters") or {}).get(kind) or {}
    scaling = config.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type") or rope.get("rope_type") or "default"
    if rope_type != "default":
        raise ModelLoadError(f"config.json: rope type '{rope_type}' is not supported; only 'default' is")
    if "rope_theta" in rope:
        return float(rope["rope_theta"])
    theta = config["local_rope_theta"] if kind == LOCAL else None  # null: that of the other layers
    return float(theta or config["global_rope_theta"])


def _local_layers(config: dict[str, Any]) -> frozenset[int]:
    """Numbers of the layers that see a window; the first of each `global_attn_every_n_layers` sees everything."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if not kinds:
        return frozenset(number for number in layers if number % config["global_attn_every_n_layers"])
    if len(kinds) != len(layers) or not {GLOBAL, LOCAL}.issuperset(kinds):
        raise ModelLoadError(f"config.json: layer_types must name {GLOBAL} or {LOCAL} for each of {len(layers)} layers")
    return frozenset(number for number in layers if kinds[number] == LOCAL)


def _published_name(name: str) -> str:
    """`layers.3.qkv` -> `model.layers.3.attn.Wqkv.weight`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
