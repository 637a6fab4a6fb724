"""What the engine must know about a checkpoint: shapes of the decoder, and how its family denoises.

A family (one file each, beside this one) turns a published `config.json` into a `ModelSpec`; nothing else in the
engine looks at configuration files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contract.sampling import Commit, Rule
from worker.engine.models.rope import Yarn

Attention = Literal["causal_context", "block_causal", "bidirectional", "causal", "canvas"]
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
    """Shapes and options of the lean decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU or experts).

    fused_qkv: one weight holds all query heads, then all key heads, then all value heads.
    rotary_dim: how many of a head's first dimensions are rotated; None: all.
    window: how many positions to either side `local_layers` see.

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
    fused_qkv: bool = False
    rotary_dim: int | None = None
    yarn: Yarn | None = None
    experts: Experts | None = None
    window: int = 0
    local_layers: frozenset[int] = frozenset()

    @property
    def active_mlp_weights(self) -> int:
        """Weights of all layers' MLPs that one position passes: with experts, the routers' and of those it goes to."""
        dense = 3 * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return self.layers * dense
        e = self.experts
        mixture = self.hidden_size * (e.number + 3 * (e.top_k * e.intermediate_size + e.shared_intermediate_size))
        return e.dense_layers * dense + (self.layers - e.dense_layers) * mixture


@dataclass(frozen=True, kw_only=True)
class TextFacts:
    """What a family says about text, which the engine never sees.

    tokenizer_class: transformers' class for checkpoints whose tokenizer names a class of their own.
    template_values: what the chat template is given beside the messages.
    chat_template: the family's, for checkpoints whose tokenizer has none.
    end_of_answer: a text at which answers end, where no token of its own says so.
    tokenizer_home: the repository whose tokenizer belongs to checkpoints that are published without one.
    """

    tokenizer_class: str | None = None
    template_values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    chat_template: str | None = None
    end_of_answer: str | None = None
    tokenizer_home: str | None = None


@dataclass(frozen=True)
class ModelSpec(TextFacts):
    """A checkpoint's family facts.

    attention: `causal_context` sees finished text causally and the active block in both directions;
    `block_causal` sees earlier blocks, and its own in both directions; `bidirectional` sees the whole canvas;
    `causal` sees what was put in before it, masks last. shift: the prediction for position i is read at i - 1.
    grid: block-causal blocks are counted from the beginning of the `text`, or so that one begins with the `answer`;
    then the prompt's first one is short. last_block: it is `whole`, or `cut` where the answer ends (block-causal).
    commit: whether a finished block is written by a forward of its own, or by the next block's first denoise step.
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
    grid: Literal["text", "answer"] = "text"
    last_block: Literal["whole", "cut"] = "whole"
    spare_tensors: frozenset[str] = frozenset()
