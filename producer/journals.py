"""The log files of all processes as one stream in the order of time, filtered while they are read.

Reads what `contract.logs` writes, also of other hosts that share the folder, rotated and compressed. Memory does not
grow with the files: a line is held for each file that is open, and a file is open only while the stream is within the
time it covers. Knows neither batches nor Redis.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from contract.audit import NAME as AUDIT
from contract.errors import UsageError
from contract.logfiles import Found, lines, listed

STAMP = re.compile(rb'\{"timestamp": "([0-9T:.+-]+)Z"')
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

Wanted = Callable[[bytes], bool]
Stream = Iterator[tuple[bytes, bytes]]


def merged(folder: Path, wanted: Wanted, since: float | None = None) -> Iterator[dict[str, Any]]:
    """The lines of all files in `folder` that are `wanted` and not older than `since` (seconds since the epoch).

    `wanted` sees the bytes of a line, to spare most of them being parsed. Lines that are no JSON are passed over.
    """
    waiting = deque(sorted(_beginnings(folder, since), key=lambda one: one[0]))
    streams: list[tuple[bytes, int, bytes, Stream]] = []
    number = 0
    while waiting or streams:
        while waiting and (not streams or waiting[0][0] <= streams[0][0]):
            number += 1
            _next(streams, number, _lines(waiting.popleft()[1], wanted, since))
        if not streams:
            return
        _, which, line, stream = heapq.heappop(streams)
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
        _next(streams, which, stream)


def unordered(folder: Path, wanted: Wanted, since: float | None = None) -> Iterator[dict[str, Any]]:
    """The same lines, one file after the other; those of one process in their order."""
    for found in listed(folder):
        if found.stem == AUDIT or (since is not None and found.modified < since):
            continue
        for _, line in _lines(found, wanted, since):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    yield event


def _next(streams: list[tuple[bytes, int, bytes, Stream]], number: int, stream: Stream) -> None:
    """Put the stream's next line among the others'; a stream that has none is not there any more."""
    for stamp, line in stream:
        heapq.heappush(streams, (stamp, number, line, stream))
        return


def _beginnings(folder: Path, since: float | None) -> Iterator[tuple[bytes, Found]]:
    """The files that may hold something, each with the time of its first line."""
    for found in listed(folder):
        if found.stem == AUDIT or (since is not None and found.modified < since):
            continue
        with contextlib.closing(lines(found.path)) as stream:
            first = next((stamp[1] for line in stream if (stamp := STAMP.match(line))), None)
        if first is not None:
            yield first, found


def _lines(found: Found, wanted: Wanted, since: float | None) -> Stream:
    least = b"" if since is None else stamp_of(since)
    for line in lines(found.path):
        if wanted(line) and (stamp := STAMP.match(line)) and stamp[1] >= least:
            yield stamp[1], line


def stamp_of(at: float) -> bytes:
    """A moment as the lines have it, without its Z: such texts are in order as the moments are."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "").encode()


def moment_of(event: dict[str, Any]) -> float:
    """When an event was logged, in seconds since the epoch."""
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()


def since(text: str) -> float:
    """`24h`, `90m`, `7d`, or a moment such as 2026-12-02T22:00 (local time), as seconds since the epoch.

    Raises UsageError.
    """
    if span := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip()):
        return time.time() - float(span[1]) * UNITS[span[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        raise UsageError(f"--since takes 24h, 90m, 7d or a moment such as 2026-12-02T22:00, not '{text}'") from None
