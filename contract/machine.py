"""The machine on which something was measured: what a report of either side records, so that others can repeat it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def facts() -> dict[str, Any]:
    """Processor, cores, Python, date, revision of the source, and how busy the machine is now."""
    return {
        "cpu": _cpu_name(),
        "cpu_flags": _cpu_flags(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _revision(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _cpu_info())
    return found[1].strip() if found else platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    found = re.search(r"flags\s*:\s*(.+)", _cpu_info())
    here = set(found[1].split()) if found else set()
    return [flag for flag in CPU_FLAGS if flag in here]


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
