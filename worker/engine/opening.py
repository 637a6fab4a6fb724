"""Which engine a checkpoint needs: decided once, by its family."""

from __future__ import annotations

from pathlib import Path

from contract.errors import ModelLoadError
from worker.engine.canvas.engine import CanvasEngine
from worker.engine.canvas.loading import CanvasLoaded, load_canvas
from worker.engine.engine import Engine
from worker.engine.loading import Loaded, read_config
from worker.engine.loading import load as load_masked
from worker.engine.models.quantized import ONLY_LEAN, Quantize
from worker.engine.models.registry import CANVAS_FAMILIES, architecture_of

AnyLoaded = Loaded | CanvasLoaded
AnyEngine = Engine | CanvasEngine


def load(
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    threads: int = 0,
    allow_pickles: bool = False,
    quantize: Quantize = "none",
) -> AnyLoaded:
    """Load the checkpoint in `folder`; `threads` of the CPU are set for the process, 0 leaves torch's choice.

    Raises ModelLoadError naming what is missing, unexpected or wrongly shaped, or why the device cannot be used.
    """
    if architecture_of(read_config(folder)) not in CANVAS_FAMILIES:
        return load_masked(folder, device, dtype, threads, allow_pickles, quantize)
    if quantize != "none":
        raise ModelLoadError(ONLY_LEAN)
    return load_canvas(folder, device, dtype, threads, allow_pickles)


def engine_of(
    loaded: AnyLoaded,
    max_rows: int = 32,
    max_step_tokens: int = 2048,
    prefix_cache_mb: int = 256,
    exact_timing: bool = False,
    urgent_rows: int = 0,
) -> AnyEngine:
    """A fresh engine for a loaded model. Random canvases share no beginnings: `prefix_cache_mb` is nothing to them."""
    model = (loaded.spec, loaded.decoder, max_rows, max_step_tokens)
    if isinstance(loaded, CanvasLoaded):
        return CanvasEngine(*model, exact_timing=exact_timing, urgent_rows=urgent_rows)
    return Engine(*model, prefix_cache_mb, exact_timing=exact_timing, urgent_rows=urgent_rows)
