"""A checkpoint folder -> spec and decoder, on a device and in a dtype. Runs no code from the folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contract.errors import ModelLoadError
from worker.engine.models.decoder import dtype_of
from worker.engine.models.decoders import AnyDecoder, build, shapes
from worker.engine.models.quantized import Quantize, linear_for
from worker.engine.models.registry import model_spec
from worker.engine.models.spec import NAME, DecoderConfig, ModelSpec
from worker.engine.placement import layer_devices, place_layers
from worker.engine.weights import open_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run."""

    spec: ModelSpec
    decoder: AnyDecoder
    quantize: Quantize = "none"

    @property
    def device(self) -> str:
        """The device, or all of them over which the layers are spread, with + between."""
        return "+".join(dict.fromkeys(str(one) for one in (self.decoder.device, *layer_devices(self.decoder))))

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in shapes(self.spec.decoder).values())


def load(
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    allow_pickles: bool = False,
    quantize: Quantize = "none",
) -> Loaded:
    """Load the checkpoint in `folder`; `threads` of the CPU are set for the process, 0 leaves torch's choice.

    `device`: one, or several with + between them over which the layers are spread. Raises ModelLoadError naming what is
    missing, unexpected or wrongly shaped, or why the device cannot be used.
    """
    spec = model_spec(read_config(folder) | {NAME: checkpoint_name(folder)})
    places = [choose_device(one) for one in device.split("+")]
    wanted = choose_dtype(dtype, places[0])
    where = _placing(spec, places)
    if threads:
        torch.set_num_threads(threads)
    linear = linear_for(quantize, places[0], wanted)
    with ExitStack() as stack:
        fetch = _fetch(folder, spec, allow_pickles, stack)
        decoder = build(spec.decoder, lambda name: fetch(name).to(where(name), dtype_of(name, wanted)), linear)
    return Loaded(spec, decoder, quantize)


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelLoadError(f"no model at {folder}: config.json is missing; name a checkpoint folder with --model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return config


def checkpoint_name(folder: Path) -> str:
    """The folder's name; in a hub cache (`models--OWNER--NAME/snapshots/COMMIT`) the repository's."""
    folder = folder.absolute()
    return folder.parents[1].name.rsplit("--")[-1] if folder.parent.name == "snapshots" else folder.name


def _placing(spec: ModelSpec, places: Sequence[torch.device]) -> Callable[[str], torch.device]:
    """The device of a weight, by our name."""
    if len(places) == 1:
        return lambda name: places[0]
    if type(spec.decoder) is not DecoderConfig:
        raise ModelLoadError("only models with Llama's kind of decoder are spread over devices: name one device")
    layers = place_layers(shapes(spec.decoder), spec.decoder.layers, places)
    return lambda name: layers[int(name.split(".")[1])] if name.startswith("layers.") else places[0]


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA when it is there, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ModelLoadError(f"unknown device '{device}': use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ModelLoadError(f"device '{device}' is not there: {torch.cuda.device_count()} CUDA devices are visible")
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it natively, else float32."""
    if dtype != "auto":
        return DTYPES[dtype]
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_multiplies_bfloat16()
    return torch.bfloat16 if native else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX; torch names these probes privately, so their absence means no."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def _fetch(folder: Path, spec: ModelSpec, allow_pickles: bool, stack: ExitStack) -> Callable[[str], Tensor]:
    """A function from our weight name to the tensor; complains at once about anything that does not fit."""
    stored = open_weights(folder, allow_pickles, stack)
    wanted = {spec.tensor_name(name): shape for name, shape in shapes(spec.decoder).items()}
    # A tied head is sometimes stored as well; it is the embedding again.
    spare = spec.spare_tensors | ({spec.tensor_name("head")} if spec.decoder.tied_head else set())
    compare(folder, wanted, {name: one.shape for name, one in stored.items()}, spare)
    return lambda name: stored[spec.tensor_name(name)].read()


def compare(
    folder: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], spare: Set[str]
) -> None:
    """Complain about every tensor that is missing, has another shape, or is neither wanted nor `spare`."""
    complaints = [f"missing {name}" for name in wanted if name not in found]
    complaints += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    complaints += [f"unexpected {name}" for name in found if name not in wanted and name not in spare]
    if complaints:
        more = f" and {len(complaints) - 5} more" if len(complaints) > 5 else ""
        raise ModelLoadError(f"{folder}: weights do not fit: {'; '.join(complaints[:5])}{more}")
