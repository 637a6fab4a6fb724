"""Which device holds which layer of a model that is spread over several.

The layers stand in a row, a stretch of them on each device, so that a forward passes each device once. Embedding, last
norm and head are on the first one, where tokens come in and are decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from worker.engine.models.decoder import Decoder
from worker.engine.models.decoders import AnyDecoder


def place_layers(
    shapes: dict[str, tuple[int, ...]], layers: int, devices: Sequence[torch.device]
) -> list[torch.device]:
    """A device for each layer, so that all devices hold about as much; `shapes` as the loader knows them.

    A layer goes to the device on which its middle falls when all weights are laid end to end.
    """
    sizes = [0] * layers
    outside = 0
    for name, shape in shapes.items():
        if name.startswith("layers."):
            sizes[int(name.split(".")[1])] += math.prod(shape)
        else:
            outside += math.prod(shape)
    share = (outside + sum(sizes)) / len(devices)
    placed, before = [], outside
    for size in sizes:
        placed.append(devices[min(int((before + size / 2) / share), len(devices) - 1)])
        before += size
    return placed


def layer_devices(decoder: AnyDecoder) -> list[torch.device]:
    """Where each layer of a loaded decoder is."""
    if isinstance(decoder, Decoder):
        return [layer.device for layer in decoder.layers]
    return [decoder.device] * decoder.config.layers


def stretches(devices: Sequence[torch.device]) -> list[tuple[torch.device, int]]:
    """Neighbouring layers on one device: (device, layers)."""
    return [(device, len(list(alike))) for device, alike in groupby(devices)]
