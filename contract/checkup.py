"""What may be wrong with the machine and the server, for whoever looks: `producer doctor`, `worker check`, the metrics.

Each look gives what is wrong, or None. Nothing here repairs, and nothing raises because of what it finds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_SHARE = 0.02
LARGEST_SKEW_S = 5.0
"""Times in output rows and reports are those of different machines; leases are the server's alone."""
MOST_MEMORY_SHARE = 0.9


class Trouble(NamedTuple):
    """What is wrong and what to do. A `note` is worth knowing, and no reason to call it ill."""

    what: str
    remedy: str
    note: bool = False


def disk(folder: Path) -> Trouble | None:
    """Too little room on the disk of `folder`."""
    usage = shutil.disk_usage(folder)
    if usage.free >= max(LEAST_FREE_BYTES, LEAST_FREE_SHARE * usage.total):
        return None
    return Trouble(f"{usage.free >> 20} MB of {usage.total >> 20} are free", "make room: workers stop when it is full")


def clock(server_now: float, asked_at: float) -> Trouble | None:
    """`server_now` is what the server's clock said between `asked_at` and this moment."""
    skew = server_now - (asked_at + time.time()) / 2
    if abs(skew) <= LARGEST_SKEW_S:
        return None
    which = "ahead of" if skew > 0 else "behind"
    return Trouble(f"the server's clock is {abs(skew):.1f} s {which} this machine's", "let both keep time by NTP")


def persistence(info: Mapping[str, Any]) -> Trouble | None:
    """`info` is the server's INFO. One that does not tell is taken to be well."""
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status", "rdb_last_bgsave_status"):
        if str(info.get(name, "ok")) != "ok":
            return Trouble(f"the server cannot write its data to its disk ({name} is {info[name]})", "make room there")
    if info.get("aof_enabled", 1) != 1:
        remedy = "run `CONFIG SET appendonly yes` on it, unless it keeps its data in another way"
        return Trouble("a crash of the server loses what it was told since its last snapshot", remedy, note=True)
    return None


def memory(info: Mapping[str, Any]) -> Trouble | None:
    """The server has little memory left under its own limit: then it refuses writes."""
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most or used <= MOST_MEMORY_SHARE * most:
        return None
    what = f"the server uses {used >> 20} MB of the {most >> 20} that it may"
    return Trouble(what, "raise its maxmemory, or lower max_queued: what is full refuses new prompts")
