"""The weight files of a checkpoint folder as one table of tensors, mapped into memory and read one at a time.

safetensors, one file or an index of shards. Pickles only where that was allowed: unpickling runs what a file says,
and torch's restriction to tensors (`weights_only`) has been broken before.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from contract.errors import ModelLoadError

PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_weights(folder: Path, allow_pickles: bool, stack: ExitStack) -> dict[str, Stored]:
    """Published name -> tensor, of all weight files in `folder`; they stay open until `stack` is left.

    Raises ModelLoadError for a folder without weights, a missing shard, and a file that cannot be read.
    """
    files = _listed(folder, "model.safetensors.index.json") or sorted(folder.glob("*.safetensors"))
    found: dict[str, Stored] = {}
    if files:
        for file in files:
            found |= _safetensors(file, stack)
        return found
    pickles = _listed(folder, "pytorch_model.bin.index.json") or sorted(folder.glob("pytorch_model*.bin"))
    if not pickles or not allow_pickles:
        raise ModelLoadError(f"{folder}: no *.safetensors file{_pickles(folder)}")
    for file in pickles:
        found |= _pickled(file)
    return found


def _listed(folder: Path, name: str) -> list[Path]:
    """The shards that an index names, which lie beside it; none when there is no index."""
    index = folder / name
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelLoadError(f"{index} is not an index of shards: no readable 'weight_map'") from None
    for shard in names:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"{index} names {str(shard)[:80]!r}: shards must lie in the folder itself")
    missing = [shard for shard in names if not (folder / shard).is_file()]
    if missing:
        raise ModelLoadError(f"{folder}: {', '.join(missing)} missing")
    return [folder / shard for shard in names]


def _safetensors(file: Path, stack: ExitStack) -> dict[str, Stored]:
    try:
        opened: Any = stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from None

    def stored(name: str) -> Stored:
        return Stored(tuple(opened.get_slice(name).get_shape()), lambda: opened.get_tensor(name))

    return {name: stored(name) for name in opened.keys()}  # noqa: SIM118 - not a dict


def _pickled(file: Path) -> dict[str, Stored]:
    try:
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ModelLoadError(f"{file} cannot be read as a file of tensors: {reason}") from None
    if not isinstance(tensors, dict) or not all(isinstance(one, Tensor) for one in tensors.values()):
        raise ModelLoadError(f"{file} holds something else than named tensors")

    def stored(tensor: Tensor) -> Stored:
        return Stored(tuple(tensor.shape), lambda: tensor)

    return {name: stored(tensor) for name, tensor in tensors.items()}


def _pickles(folder: Path) -> str:
    """Files that may run code when read are named and left alone."""
    names = sorted(file.name for ending in PICKLES for file in folder.glob(f"*{ending}"))
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    remedy = "convert the weights to safetensors, or set allow_pickle_weights if you trust them"
    return f"; {names[0]}{more} may run code when read: {remedy}"
