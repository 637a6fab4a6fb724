"""BERT chat: what dLLM's recipe makes of a BERT, as `modernbert.py` of a ModernBERT.

Names and fields as transformers writes a BertForMaskedLM. The mask `[MASK]` is 103 and the padding `[PAD]`, which ends
answers, is 0 in Google's vocabularies; a checkpoint with another one needs `mask_token_id` in its configuration. The
context is the table of learned positions, 512 as a rule. Not shifted.
"""

from __future__ import annotations

from typing import Any

from contract.errors import ModelLoadError
from worker.engine.models.bert_decoder import BertConfig
from worker.engine.models.modernbert import CHAT_TEMPLATE, END_OF_ANSWER
from worker.engine.models.spec import ModelSpec

ARCHITECTURES = ("BertForMaskedLM",)
PADDING, MASK_ID = 0, 103
PUBLISHED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
"""Options of the published code that all usual checkpoints set alike; absent, they have these values too."""

_IN_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_OUTSIDE = {
    "embed": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "embed_norm": "bert.embeddings.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions.decoder",
}
_SPARE = frozenset(
    {
        "bert.embeddings.position_ids",
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.predictions.decoder.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    }
)
"""Copies, and heads for other tasks."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """The family facts of a checkpoint whose `config.json` is `config`."""
    for option, value in PUBLISHED.items():
        if config.get(option, value) != value:
            raise ModelLoadError(f"config.json: {option} {config[option]} is not supported for family 'bert'")
    padding = config.get("pad_token_id")
    heads = config["num_attention_heads"]
    return ModelSpec(
        family="bert",
        decoder=BertConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=heads,
            head_dim=config["hidden_size"] // heads,
            norm_eps=config["layer_norm_eps"],
            rope_theta=0.0,
            max_positions=config["max_position_embeddings"],
            tied_head=config.get("tie_word_embeddings", True),
            token_types=config["type_vocab_size"],
        ),
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
        spare_tensors=_SPARE,
    )


def _published_name(name: str) -> str:
    """`layers.3.q_bias` -> `bert.encoder.layer.3.attention.self.query.bias`."""
    if name == "head_bias":
        return "cls.predictions.bias"
    stem = name.removesuffix("_bias")
    kind = "weight" if stem == name else "bias"
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"bert.encoder.layer.{layer}.{_IN_LAYER[part]}.{kind}"
