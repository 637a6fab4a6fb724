"""A checkpoint folder -> the native model, on a device and in a dtype."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from contract.errors import ModelLoadError
from worker.engine.canvas.model import CanvasModel
from worker.engine.canvas.native import NOT_TEXT, TIED_HEAD, fill, published_shapes, text_models
from worker.engine.canvas.spec import GENERATION, CanvasSpec
from worker.engine.loading import choose_device, choose_dtype, compare, read_config
from worker.engine.models.registry import canvas_spec
from worker.engine.weights import open_weights


@dataclass(frozen=True)
class CanvasLoaded:
    """A model that is ready to run."""

    spec: CanvasSpec
    decoder: CanvasModel
    quantize: ClassVar[Literal["none"]] = "none"

    @property
    def device(self) -> str:
        return str(self.decoder.device)

    @property
    def parameters(self) -> int:
        return self.decoder.parameters


def load_canvas(
    folder: Path, device: str = "auto", dtype: str = "auto", threads: int = 0, allow_pickles: bool = False
) -> CanvasLoaded:
    """Load the checkpoint in `folder`; options and errors are those of `worker.engine.load`."""
    spec = canvas_spec(read_config(folder) | {GENERATION: _generation(folder)})
    target = choose_device(device)
    wanted = choose_dtype(dtype, target)
    if threads:
        torch.set_num_threads(threads)
    decoder, encoder = text_models(spec)
    with ExitStack() as stack:
        stored = open_weights(folder, allow_pickles, stack)
        text = {name: one.shape for name, one in stored.items() if not name.startswith(NOT_TEXT)}
        compare(folder, published_shapes(decoder, encoder), text, spare={TIED_HEAD})
        fill(decoder, encoder, lambda name: stored[name].read().to(target, wanted))
    return CanvasLoaded(spec, CanvasModel(decoder, encoder))


def _generation(folder: Path) -> dict[str, Any]:
    """`generation_config.json`; it may be left out."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} is not a JSON object")
    return values
