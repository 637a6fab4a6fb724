"""ModernBERT's masked language model over packed tokens (Warner et al., 2024).

LayerNorms without bias, also behind the embedding; attention whose layers see everything or a window, each kind with
its own RoPE base; GeGLU; and a head that transforms the states before it meets the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.decoder import Attend, Fetch
from worker.engine.models.fused_qkv import attention
from worker.engine.models.linear import Head, Linear
from worker.engine.models.rope import rope_tables
from worker.engine.models.spec import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(DecoderConfig):
    """`rope_theta` is that of the layers that see everything."""

    local_rope_theta: float


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    attention_norm: Tensor | None  # (d,); the first layer's input comes from a norm already
    qkv: Linear  # (3 d, d)
    o: Linear  # (d, d)
    mlp_norm: Tensor  # (d,)
    gate_up: Linear  # (2 * intermediate, d)
    down: Linear  # (d, intermediate)


class ModernBertDecoder:
    """Weights and forward pass. `hidden` is called under `torch.inference_mode` by the runner."""

    def __init__(self, config: ModernBertConfig, fetch: Fetch) -> None:
        self.config = config
        self.embed = fetch("embed")  # (V, d)
        self.embed_norm = fetch("embed_norm")  # (d,)
        self.layers = [_layer(number, fetch) for number in range(config.layers)]
        self.norm = fetch("norm")  # (d,)
        self.transform = Linear(fetch("transform"))  # (d, d)
        self.transform_norm = fetch("transform_norm")  # (d,)
        self.head = Head(self.embed if config.tied_head else fetch("head"), bias=fetch("head_bias"))  # (V, d)
        tables = partial(rope_tables, config.head_dim, yarn=None, positions=config.max_positions)
        thetas = (config.rope_theta, config.local_rope_theta)
        self.rope = [tables(theta, dtype=self.dtype, device=self.device) for theta in thetas]

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """tokens (T,), positions (T,), wanted (N,) indices into T -> states there (N, d), ready for the head."""
        x = self._norm(F.embedding(tokens, self.embed), self.embed_norm)
        rope = [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self.rope]
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            normed = x if layer.attention_norm is None else self._norm(x, layer.attention_norm)
            local = number in self.config.local_layers
            seen = attention(number, layer.qkv, normed, self.config.heads, rope[local], attend)
            if number == last:  # all positions leave their keys and values; only the wanted ones go on
                x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            x = x + layer.o(seen)
            x = x + _geglu(self._norm(x, layer.mlp_norm), layer)
        return self._norm(F.gelu(self.transform(self._norm(x, self.norm))), self.transform_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, eps=self.config.norm_eps)


def _geglu(x: Tensor, layer: Layer) -> Tensor:
    """GELU without approximation, of the first half."""
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(F.gelu(gate) * up)


def _layer(number: int, fetch: Fetch) -> Layer:
    def get(part: str) -> Tensor:
        return fetch(f"layers.{number}.{part}")

    return Layer(
        attention_norm=get("attention_norm") if number else None,
        qkv=Linear(get("qkv")),
        o=Linear(get("o")),
        mlp_norm=get("mlp_norm"),
        gate_up=Linear(get("gate_up")),
        down=Linear(get("down")),
    )


def shapes(config: ModernBertConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every weight a checkpoint must hold."""
    d, wide, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    table: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, d),
        "embed_norm": (d,),
        "norm": (d,),
        "transform": (d, d),
        "transform_norm": (d,),
        "head_bias": (vocabulary,),
    }
    if not config.tied_head:
        table["head"] = (vocabulary, d)
    one = {"qkv": (3 * d, d), "o": (d, d), "mlp_norm": (d,), "gate_up": (2 * wide, d), "down": (d, wide)}
    for number in range(config.layers):
        table |= {f"layers.{number}.{part}": shape for part, shape in one.items()}
        if number:
            table[f"layers.{number}.attention_norm"] = (d,)
    return table
