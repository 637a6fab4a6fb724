"""The most memory held during a stretch of work: of the device for CUDA, else of the process."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Start a new stretch; on systems that cannot, peaks stay those since the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: what earlier work freed goes back to the system and counts no more
    with suppress(OSError):
        CLEAR.write_text("5")  # Linux: resets VmHWM


def peak_mb(device: torch.device) -> int:
    """Megabytes at the highest point since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) >> 20
    found = re.search(r"VmHWM:\s*(\d+) kB", STATUS.read_text()) if STATUS.is_file() else None
    if found:
        return int(found[1]) >> 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> 20 if sys.platform == "darwin" else peak >> 10
