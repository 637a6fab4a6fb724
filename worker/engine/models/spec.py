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
class Experts:
    """A mixture of experts in place of the MLP, in all layers after the first `dense_layers`.

    intermediate_size is that of one expert, shared_intermediate_size that of an expert which every position passes
    (0: there is none). router: `softmax` over all experts, `sigmoid` of each, which is computed in float32 throughout.
    groups, top_groups: experts are chosen from the best `top_groups` of `groups` equal parts. bias: a number for each
    expert that is added to its score for the choice. renormalise: the scores of the chosen ones are divided by their
    sum; `scale` multiplies them in any case.
    """

    number: int
    top_k: int
    intermediate_size: int
    router: Literal["softmax", "sigmoid"]
    renormalise: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    shared_intermediate_size: int = 0
    dense_layers: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and options of the one lean decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU or experts).

    fused_qkv: one weight holds all query heads, then all key heads, then all value heads.
    rotary_dim: how many of a head's first dimensions are rotated; None: all.
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
    fused_qkv: bool = False
    rotary_dim: int | None = None
    experts: Experts | None = None

    @property
    def active_mlp_weights(self) -> int:
        """Weights of all layers' MLPs that one position passes: with experts, the routers' and of those it goes to."""
        dense = 3 * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return self.layers * dense
        e = self.experts
        mixture = self.hidden_size * (e.number + 3 * (e.top_k * e.intermediate_size + e.shared_intermediate_size))
        return e.dense_layers * dense + (self.layers - e.dense_layers) * mixture


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
