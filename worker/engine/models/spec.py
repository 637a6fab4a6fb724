"""What the engine must know about a checkpoint: shapes of the decoder, and how its family denoises.

A family (one file each, beside this one) turns a published `config.json` into a `ModelSpec`; nothing else in the
engine looks at configuration files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.sampling import Commit, Rule

Attention = Literal["causal_context", "block_causal", "bidirectional"]
NAME = "_name_or_path"
"""The field in which the loader hands a family the checkpoint's name: some facts are published nowhere else."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and options of the lean decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU).

    Other decoders have a subclass each, with what only they need; `decoders.py` goes by it. The rest of the engine
    (attention, slots, memory, admission) reads the fields here whatever the decoder.
    """

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
    window: int = 0  # positions to either side that local layers see
    local_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ModelSpec:
    """A checkpoint's family facts.

    attention: `causal_context` sees finished text causally and the active block in both directions;
    `block_causal` sees earlier blocks, and its own in both directions, on a grid from position 0;
    `bidirectional` sees the whole canvas. shift: the prediction for position i is read at i - 1.
    commit: whether a finished block is written by a forward of its own, or by the next block's first denoise step.
    tokenizer_class: transformers' class for checkpoints whose tokenizer names a class of their own.
    template_values: what the chat template is given beside the messages.
    chat_template: the family's, for checkpoints whose tokenizer has none.
    end_of_answer: a text at which answers end, where no token of its own says so.
    tokenizer_home: the repository whose tokenizer belongs to checkpoints that are published without one.
    tensor_name: our name of a weight (`layers.0.q`, `embed`, `head` …) to the published one.
    spare_tensors: published names that may be stored and say nothing new.
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
    chat_template: str | None = None
    end_of_answer: str | None = None
    tokenizer_home: str | None = None
    spare_tensors: frozenset[str] = frozenset()
