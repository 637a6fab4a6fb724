"""Under which conditions a figure was measured."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from contract import machine
from worker.engine import Loaded


def conditions(model: str, loaded: Loaded) -> dict[str, Any]:
    """Model, machine, versions, date and load of the machine before anything runs."""
    decoder = loaded.decoder
    return {
        "model": model,
        "family": loaded.spec.family,
        "parameters": loaded.parameters,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "quantize": loaded.quantize,
        "device": _device(decoder.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **machine.facts(),
    }


def _device(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
