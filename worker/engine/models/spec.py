"""What the engine must know about a checkpoint: shapes of the decoder, and how its family denoises.

A family (one file each, beside this one) turns a published `config.json` into a `ModelSpec`; nothing else in the
engine looks at configuration files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.sampling import Commit, Rule

Attention = Literal["causal_context", "block_causal", "bidirectional", "canvas"]
NAME = "_name_or_path"
"""The field in which the loader hands a family the checkpoint's name: some facts are published nowhere else."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and options of the one lean decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's family facts.

    attention: `causal_context` sees finished text causally and the active block in both directions;
    `block_causal` sees earlier blocks, and its own in both directions, on a grid from position 0;
    `bidirectional` sees the whole canvas. shift: the prediction for position i is read at i - 1.
    commit: whether a finished block is written by a forward of its own, or by the next block's first denoise step.
    tokenizer_class: transformers' class for checkpoints whose tokenizer names a class of their own.
    template_values: what the chat template is given beside the messages.
    tensor_name: our name of a weight (`layers.0.q`, `embed`, `head` …) to the published one.
    """

    family: str
    decoder: DecoderConfig
    attention: Attention
    shift: bool
    mask_id: int
    stop_ids: frozenset[int]
    block_length: int
    rule: Rule
    threshold: float
    tensor_name: Callable[[str], str]
    commit: Commit = "separate"
    tokenizer_class: str | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict, hash=False)
