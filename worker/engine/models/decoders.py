"""The decoder that runs a configuration: told by the configuration's class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from contract.errors import ModelLoadError
from worker.engine.models import bert_decoder, decoder, dit_decoder, modernbert_decoder
from worker.engine.models.decoder import Attend, Fetch
from worker.engine.models.linear import Head, Linear, MakeLinear
from worker.engine.models.quantized import ONLY_LEAN
from worker.engine.models.spec import DecoderConfig


class AnyDecoder(Protocol):
    """What the engine asks of a decoder."""

    config: DecoderConfig
    head: Head

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """tokens (T,), positions (T,), wanted (N,) indices into T -> states there (N, d), ready for the head."""


@dataclass(frozen=True)
class Kind:
    """A decoder's class, and the shapes of the weights that it needs."""

    build: Callable[..., AnyDecoder]
    shapes: Callable[[Any], dict[str, tuple[int, ...]]]


KINDS: dict[type[DecoderConfig], Kind] = {
    DecoderConfig: Kind(decoder.Decoder, decoder.shapes),
    modernbert_decoder.ModernBertConfig: Kind(modernbert_decoder.ModernBertDecoder, modernbert_decoder.shapes),
    bert_decoder.BertConfig: Kind(bert_decoder.BertDecoder, bert_decoder.shapes),
    dit_decoder.DitConfig: Kind(dit_decoder.DitDecoder, dit_decoder.shapes),
}


def build(config: DecoderConfig, fetch: Fetch, linear: MakeLinear = Linear) -> AnyDecoder:
    """The decoder of `config`, its weights taken from `fetch`; the lean one holds them as `linear` does.

    Raises ModelLoadError where another decoder is asked to do so.
    """
    if linear is Linear:
        return KINDS[type(config)].build(config, fetch)
    if type(config) is not DecoderConfig:
        raise ModelLoadError(ONLY_LEAN)
    return decoder.Decoder(config, fetch, linear)


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Our name -> shape of every weight a checkpoint must hold; what the loader checks against."""
    return KINDS[type(config)].shapes(config)
