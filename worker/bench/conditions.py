"""Under which conditions a figure was measured."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from worker.engine import Loaded

CPU_INFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


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
        "cpu": _cpu_name(),
        "cpu_flags": _cpu_flags(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _revision(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _device(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _cpu_info())
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    found = re.search(r"flags\s*:\s*(.+)", _cpu_info())
    here = set(found[1].split()) if found else set()
    return [flag for flag in FLAGS if flag in here]


def _cpu_info() -> str:
    return CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.is_file() else ""


def _revision() -> str | None:
    """The source's git revision, with `+` when files differ from it; None outside a checkout."""
    try:
        head, changes = (
            subprocess.run(
                ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changes else "")
