"""Ends a worker whose denoise step does not end: a kernel that hangs, a driver that waits for ever.

The rows are not given back, because a row that hangs one worker would hang the next. The process ends, its leases run
out, and the starts that never ended stay counted: a row that does it three times is quarantined.
"""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Callable
from types import TracebackType

import structlog

from worker.progress import Progress

LAST_WORDS_S = 10.0
"""So long the log and the server may take before the end; either may be what hangs."""


class Watchdog:
    """A thread that looks at `progress`. A context manager; `end` is called with the reason, and must not return.

    It counts looks, not seconds: a process that was suspended, and its watchdog with it, is not ended when it wakes.
    """

    def __init__(
        self,
        progress: Progress,
        step_timeout_s: float,
        last_words: Callable[[str], object],
        end: Callable[[str], object],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._progress = progress
        self._step_timeout_s = step_timeout_s
        self._pause_s = min(1.0, step_timeout_s / 10)
        self._last_words = last_words
        self._end = end
        self._log = log
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        looks, seen = 0, None
        while not self._stopping.wait(self._pause_s):
            step = self._progress.steps if self._progress.stepping else None
            looks = looks + 1 if step is not None and step == seen else 0
            seen = step
            if looks * self._pause_s >= self._step_timeout_s:
                self._bite(f"a denoise step did not end within {self._step_timeout_s:g} s")
                return

    def _bite(self, reason: str) -> None:
        speaking = threading.Thread(target=self._speak, args=(reason,), daemon=True)
        speaking.start()
        speaking.join(LAST_WORDS_S)
        self._end(reason)

    def _speak(self, reason: str) -> None:
        step, rows = self._progress.steps, self._progress.rows
        self._log.critical("step_timeout", reason=reason, step=step, rows=rows, stacks=stacks())
        self._last_words(reason)


def stacks() -> str:
    """Where every thread of this process is at this moment."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
