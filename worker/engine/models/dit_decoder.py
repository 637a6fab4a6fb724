"""The diffusion transformer of MDLM and BD3-LM over packed tokens (Sahoo et al., 2024; Arriola et al., 2025).

LayerNorm, RoPE, an MLP with biases and GELU, and adaptive norms (adaLN, Peebles & Xie, 2023): a noise level scales and
shifts what a norm gives and scales what a branch adds. These models are trained without one, that is with the level 0
throughout, so what it does is constant: it is computed once and folded into the weights beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.decoder import Attend, Fetch
from worker.engine.models.fused_qkv import attention
from worker.engine.models.linear import Head, Linear
from worker.engine.models.rope import rope_tables
from worker.engine.models.spec import DecoderConfig

FREQUENCIES = 128
"""Cosines, and as many sines, that tell the noise level."""


@dataclass(frozen=True)
class DitConfig(DecoderConfig):
    """`condition_size`: width of what is made of the noise level; 0: the norms are plain ones."""

    condition_size: int = 0

    @property
    def active_mlp_weights(self) -> int:
        """Two products, where others have three."""
        return 2 * self.layers * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Norm:
    """A LayerNorm's weight and bias, (d,) each; plain ones have no bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Layer:
    """One layer's weights, its adaptive norms folded in."""

    attention_norm: Norm
    qkv: Linear  # (3 d, d)
    o: Linear  # (d, d)
    mlp_norm: Norm
    up: Linear  # (intermediate, d), biased
    down: Linear  # (d, intermediate), biased


class DitDecoder:
    """Weights and forward pass. `hidden` is called under `torch.inference_mode` by the runner."""

    def __init__(self, config: DitConfig, fetch: Fetch) -> None:
        self.config = config
        condition = _condition(fetch) if config.condition_size else None
        self.embed = fetch("embed")  # (V, d)
        self.layers = [_layer(number, fetch, condition) for number in range(config.layers)]
        self.norm = _last_norm(fetch, condition)
        self.head = Head(fetch("head"), bias=fetch("head_bias"))  # (V, d)
        rope = (config.max_positions, self.dtype, self.device)
        self.cos, self.sin = rope_tables(config.head_dim, config.rope_theta, None, *rope)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """tokens (T,), positions (T,), wanted (N,) indices into T -> states there (N, d), ready for the head."""
        x = F.embedding(tokens, self.embed)
        rope = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # (T, 1, head_dim)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            normed = self._norm(x, layer.attention_norm)
            seen = attention(number, layer.qkv, normed, self.config.heads, rope, attend)
            if number == last:  # all positions leave their keys and values; only the wanted ones go on
                x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            x = x + layer.o(seen)
            x = x + layer.down(F.gelu(layer.up(self._norm(x, layer.mlp_norm)), approximate="tanh"))
        return self._norm(x, self.norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self.config.norm_eps)


def _condition(fetch: Fetch) -> Tensor:
    """(condition_size,) float32: what a noise level of 0 says to every layer. Its cosines are 1, its sines 0."""
    get = {name: fetch(name).float() for name in ("time_in", "time_in_bias", "time_out", "time_out_bias")}
    waves = torch.tensor([1.0] * FREQUENCIES + [0.0] * FREQUENCIES, device=get["time_in"].device)
    inner = F.silu(F.linear(waves, get["time_in"], get["time_in_bias"]))
    return F.silu(F.linear(inner, get["time_out"], get["time_out_bias"]))


def _layer(number: int, fetch: Fetch, condition: Tensor | None) -> Layer:
    def get(part: str) -> Tensor:
        return fetch(f"layers.{number}.{part}")

    def scaled(part: str, gate: Tensor | None) -> Tensor:
        weight = get(part)
        return weight if gate is None else (weight.float() * gate.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)

    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _modulation(get, condition, 6)
    return Layer(
        attention_norm=_norm(get("attention_norm"), shift, scale),
        qkv=Linear(get("qkv")),
        o=Linear(scaled("o", gate)),
        mlp_norm=_norm(get("mlp_norm"), mlp_shift, mlp_scale),
        up=Linear(get("up"), get("up_bias")),
        down=Linear(scaled("down", mlp_gate), scaled("down_bias", mlp_gate)),
    )


def _last_norm(fetch: Fetch, condition: Tensor | None) -> Norm:
    return _norm(fetch("norm"), *_modulation(fetch, condition, 2))


def _modulation(get: Fetch, condition: Tensor | None, parts: int) -> tuple[Tensor | None, ...]:
    """(d,) float32 each: the shifts, scales and gates of an adaptive norm, in the order in which they are stored."""
    if condition is None:
        return (None,) * parts
    return F.linear(condition, get("modulation").float(), get("modulation_bias").float()).chunk(parts)


def _norm(weight: Tensor, shift: Tensor | None, scale: Tensor | None) -> Norm:
    """norm(x) * weight * (1 + scale) + shift."""
    if shift is None or scale is None:
        return Norm(weight, None)
    return Norm((weight.float() * (1 + scale)).to(weight.dtype), shift.to(weight.dtype))


def shapes(config: DitConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every weight a checkpoint must hold."""
    d, wide, vocabulary, c = config.hidden_size, config.intermediate_size, config.vocab_size, config.condition_size
    table: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, d),
        "norm": (d,),
        "head": (vocabulary, d),
        "head_bias": (vocabulary,),
    }
    one: dict[str, tuple[int, ...]] = {
        "attention_norm": (d,),
        "qkv": (3 * d, d),
        "o": (d, d),
        "mlp_norm": (d,),
        "up": (wide, d),
        "up_bias": (wide,),
        "down": (d, wide),
        "down_bias": (d,),
    }
    if c:
        table |= {"time_in": (c, 2 * FREQUENCIES), "time_in_bias": (c,), "time_out": (c, c), "time_out_bias": (c,)}
        table |= {"modulation": (2 * d, c), "modulation_bias": (2 * d,)}
        one |= {"modulation": (6 * d, c), "modulation_bias": (6 * d,)}
    for number in range(config.layers):
        table |= {f"layers.{number}.{part}": shape for part, shape in one.items()}
    return table
