"""The one lean decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts, over packed tokens.

It sees a flat list of positions from any number of rows; which of them may look at which keys is the attention
plan's business (`runner.py`). There is no padding and no batch axis here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.experts import MixtureOfExperts, expert_shapes
from worker.engine.models.linear import Head, Linear, MakeLinear
from worker.engine.models.rope import query_scale, rope_tables
from worker.engine.models.spec import DecoderConfig
from worker.engine.models.swiglu import SwiGLU, swiglu_shapes

Fetch = Callable[[str], Tensor]
"""A weight by our name (`layers.0.q`), on the device and in the dtype it will run in."""


class Attend(Protocol):
    """Stores this step's keys and values of one layer and lets every query see its own row's keys."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (T, heads, head_dim), k and v (T, kv_heads, head_dim) -> (T, heads * head_dim)."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights; projections that read the same input are stacked into one matrix."""

    attention_norm: Tensor  # (d,)
    qkv: Linear  # ((heads + 2 kv_heads) * head_dim, d)
    qk_norm: tuple[Tensor, Tensor] | None  # (head_dim,) each
    o: Linear  # (d, heads * head_dim)
    mlp_norm: Tensor  # (d,)
    mlp: Callable[[Tensor], Tensor]  # (T, d) -> (T, d)

    @property
    def device(self) -> torch.device:
        return self.attention_norm.device


class Decoder:
    """Weights and forward pass. `hidden` is called under `torch.inference_mode` by the runner.

    Layers may lie on several devices (`placement.py`); what passes through them follows.
    """

    def __init__(self, config: DecoderConfig, fetch: Fetch, linear: MakeLinear = Linear) -> None:
        self.config = config
        self.embed = fetch("embed")  # (V, d)
        self.layers = [_layer(config, number, fetch, linear) for number in range(config.layers)]
        self.norm = fetch("norm")  # (d,)
        self.head = Head(self.embed if config.tied_head else fetch("head"))  # (V, d)
        rope = (config.max_positions, self.dtype, self.device)
        width = config.rotary_dim or config.head_dim
        self.cos, self.sin = rope_tables(width, config.rope_theta, config.yarn, *rope)
        self.query_scale = query_scale(config.yarn, *rope)
        self._rotate = _rotate if config.rotary_dim is None else _rotate_first

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """tokens (T,), positions (T,), wanted (N,) indices into T -> states there (N, d), ready for the head."""
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # (T, 1, rotary_dim)
        scale = None if self.query_scale is None else self.query_scale[positions]  # (T, 1, 1)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            if layer.device != x.device:
                x, cos, sin, wanted = (one.to(layer.device) for one in (x, cos, sin, wanted))
                scale = None if scale is None else scale.to(layer.device)
            q, k, v = self._projections(layer, self._rms_norm(x, layer.attention_norm), cos, sin)
            seen = attend(number, q if scale is None else q * scale, k, v)
            if number == last:  # all positions leave their keys and values; only the wanted ones go on
                x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            x = x + layer.o(seen)
            x = x + layer.mlp(self._rms_norm(x, layer.mlp_norm))
        return self._rms_norm(x.to(self.device), self.norm)

    def _projections(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, d) -> rotated queries and keys, and values: (T, heads or kv_heads, head_dim) each."""
        c = self.config
        qkv = layer.qkv(x).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        if layer.qk_norm is not None:
            q, k = qk.split([c.heads, c.kv_heads], dim=1)
            qk = torch.cat([self._rms_norm(q, layer.qk_norm[0]), self._rms_norm(k, layer.qk_norm[1])], dim=1)
        q, k = self._rotate(qk, cos, sin).split([c.heads, c.kv_heads], dim=1)
        return q, k, v

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Statistics in float32, the weight applied in the model's dtype, as Llama and LLaDA publish it."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split: (T, heads, head_dim) -> the same."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _rotate_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `_rotate`, half-split within the first dimensions of a head; the others pass through."""
    width = cos.shape[-1]
    return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)


def _layer(config: DecoderConfig, number: int, fetch: Fetch, linear: MakeLinear) -> Layer:
    def get(part: str) -> Tensor:
        return fetch(f"layers.{number}.{part}")

    return Layer(
        attention_norm=get("attention_norm"),
        qkv=linear(
            get("qkv") if config.fused_qkv else torch.cat([get("q"), get("k"), get("v")]),
            torch.cat([get("q_bias"), get("k_bias"), get("v_bias")]) if config.qkv_bias else None,
        ),
        qk_norm=(get("q_norm"), get("k_norm")) if config.qk_norm else None,
        o=linear(get("o")),
        mlp_norm=get("mlp_norm"),
        mlp=_mlp(config, number, get, linear),
    )


def _mlp(config: DecoderConfig, number: int, get: Fetch, linear: MakeLinear) -> Callable[[Tensor], Tensor]:
    if config.experts is None or number < config.experts.dense_layers:
        return SwiGLU(get("gate"), get("up"), get("down"), linear)
    return MixtureOfExperts(config.experts, get, linear)


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every weight a checkpoint must hold; what the loader checks against."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    one: dict[str, tuple[int, ...]] = {
        "attention_norm": (c.hidden_size,),
        "o": (c.hidden_size, q),
        "mlp_norm": (c.hidden_size,),
    }
    if c.fused_qkv:
        one["qkv"] = (q + 2 * kv, c.hidden_size)
    else:
        one |= {"q": (q, c.hidden_size), "k": (kv, c.hidden_size), "v": (kv, c.hidden_size)}
    if c.qkv_bias:
        one |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if c.qk_norm:
        one |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    table: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "norm": (c.hidden_size,)}
    if not c.tied_head:
        table["head"] = (c.vocab_size, c.hidden_size)
    for number in range(c.layers):
        table |= {f"layers.{number}.{part}": shape for part, shape in (one | _mlp_shapes(c, number)).items()}
    return table


def _mlp_shapes(config: DecoderConfig, number: int) -> dict[str, tuple[int, ...]]:
    if config.experts is None or number < config.experts.dense_layers:
        return swiglu_shapes(config.hidden_size, config.intermediate_size)
    return expert_shapes(config.experts, config.hidden_size)


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """What our weight `name` is kept in: `dtype`, but for the router's bias, whose small differences choose experts."""
    return torch.float32 if name.endswith(".router_bias") else dtype
