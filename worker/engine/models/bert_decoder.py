"""BERT's masked language model over packed tokens (Devlin et al., 2019).

Learned positions, a LayerNorm behind each branch, biases everywhere, GELU, and a head that transforms the states
before it meets the vocabulary. All tokens are of type 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.engine.models.decoder import Attend, Fetch
from worker.engine.models.linear import Head, Linear
from worker.engine.models.spec import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class BertConfig(DecoderConfig):
    """Positions are learned: `rope_theta` is not used. `token_types`: rows of their table, the first of which is."""

    token_types: int

    @property
    def active_mlp_weights(self) -> int:
        """Two products, where others have three."""
        return 2 * self.layers * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Norm:
    """A LayerNorm's weight and bias, (d,) each."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Layer:
    """One layer's weights; all of its products are biased."""

    qkv: Linear  # (3 d, d)
    o: Linear  # (d, d)
    attention_norm: Norm
    up: Linear  # (intermediate, d)
    down: Linear  # (d, intermediate)
    mlp_norm: Norm


class BertDecoder:
    """Weights and forward pass. `hidden` is called under `torch.inference_mode` by the runner."""

    def __init__(self, config: BertConfig, fetch: Fetch) -> None:
        self.config = config
        self.embed = fetch("embed")  # (V, d)
        self.positions = fetch("positions") + fetch("token_types")[0]  # (max_positions, d)
        self.embed_norm = _norm("embed_norm", fetch)
        self.layers = [_layer(number, fetch) for number in range(config.layers)]
        self.transform = _linear("transform", fetch)  # (d, d)
        self.transform_norm = _norm("transform_norm", fetch)
        self.head = Head(self.embed if config.tied_head else fetch("head"), bias=fetch("head_bias"))  # (V, d)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """tokens (T,), positions (T,), wanted (N,) indices into T -> states there (N, d), ready for the head."""
        x = self._normed(F.embedding(tokens, self.embed) + F.embedding(positions, self.positions), self.embed_norm)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            q, k, v = layer.qkv(x).view(len(tokens), 3, self.config.heads, -1).unbind(1)
            seen = attend(number, q, k, v)
            if number == last:  # all positions leave their keys and values; only the wanted ones go on
                x, seen = x.index_select(0, wanted), seen.index_select(0, wanted)
            x = self._normed(x + layer.o(seen), layer.attention_norm)
            x = self._normed(x + layer.down(F.gelu(layer.up(x))), layer.mlp_norm)
        return self._normed(F.gelu(self.transform(x)), self.transform_norm)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, self.config.norm_eps)


def _linear(name: str, fetch: Fetch) -> Linear:
    return Linear(fetch(name), fetch(f"{name}_bias"))


def _norm(name: str, fetch: Fetch) -> Norm:
    return Norm(fetch(name), fetch(f"{name}_bias"))


def _layer(number: int, fetch: Fetch) -> Layer:
    def get(part: str) -> Tensor:
        return fetch(f"layers.{number}.{part}")

    return Layer(
        qkv=Linear(torch.cat([get(one) for one in "qkv"]), torch.cat([get(f"{one}_bias") for one in "qkv"])),
        o=_linear("o", get),
        attention_norm=_norm("attention_norm", get),
        up=_linear("up", get),
        down=_linear("down", get),
        mlp_norm=_norm("mlp_norm", get),
    )


def shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every weight a checkpoint must hold."""
    d, wide, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    table: dict[str, tuple[int, ...]] = {
        "embed": (vocabulary, d),
        "positions": (config.max_positions, d),
        "token_types": (config.token_types, d),
        **_biased("embed_norm", d),
        **_biased("transform", d, d),
        **_biased("transform_norm", d),
        "head_bias": (vocabulary,),
    }
    if not config.tied_head:
        table["head"] = (vocabulary, d)
    one = {"attention_norm": (d,), "mlp_norm": (d,), "up": (wide, d), "down": (d, wide)}
    for part, shape in (one | dict.fromkeys("qkvo", (d, d))).items():
        for number in range(config.layers):
            table |= _biased(f"layers.{number}.{part}", *shape)
    return table


def _biased(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {name: shape, f"{name}_bias": shape[:1]}
