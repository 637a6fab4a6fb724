"""What the logs have of a batch or a prompt, within bounds: as many events, and as much time, as a page may take."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producer.journals import merged
from producer.story import Subject

MOST = 100
SECONDS = 3.0
HEAD = ("timestamp", "event", "level", "worker", "batch", "index", "indices", "host", "pid", "logger", "process")
LONGEST = 500
AT_A_TIME = threading.BoundedSemaphore(2)
"""Pages that read logs; they read gigabytes, and the disk is the workers' too."""


class _Late(Exception):
    pass


@dataclass(frozen=True)
class Event:
    at: str
    name: str
    worker: str
    told: str


@dataclass(frozen=True)
class Story:
    """The last events in the order of time. `whole` is False where there are more, or time was up."""

    events: list[Event]
    whole: bool


def story(subject: Subject, folder: Path, since: float, within_s: float = SECONDS) -> Story:
    """What happened since `since`, seconds since the epoch."""
    kept: deque[Event] = deque(maxlen=MOST)
    count = 0
    with AT_A_TIME:
        try:
            for event in _events(subject, folder, since, within_s):
                kept.append(_event(event))
                count += 1
        except _Late:
            return Story(list(kept), False)
    return Story(list(kept), count <= MOST)


def _events(subject: Subject, folder: Path, since: float, within_s: float) -> Iterator[Mapping[str, Any]]:
    needle, until = json.dumps(subject.batch).encode(), time.monotonic() + within_s

    def wanted(line: bytes) -> bool:
        if time.monotonic() > until:
            raise _Late
        return needle in line

    return (event for event in merged(folder, wanted, since) if subject.concerns(event))


def _event(event: Mapping[str, Any]) -> Event:
    told = ", ".join(f"{name} {value}" for name, value in event.items() if name not in HEAD)
    return Event(str(event["timestamp"])[:19], str(event["event"]), str(event.get("worker", "")), told[:LONGEST])
