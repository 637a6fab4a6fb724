"""A value that is expensive to know, for many who look at it: known anew now and then, by one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 10.0
"""A value that takes long to know is asked for less often: at most this part of the time goes into it."""


class Cached(Generic[T]):
    """What `know` returned, at most `fresh_s` old while somebody looks.

    Who finds it too old starts a thread and waits for it up to `patience_s`; then the old value has to do, or None
    where there is none yet. What `know` raises is raised where somebody waits for it.
    """

    def __init__(self, know: Callable[[], T], fresh_s: float, patience_s: float) -> None:
        self._know = know
        self._fresh_s = fresh_s
        self._patience_s = patience_s
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._value: T | None = None
        self._error: Exception | None = None
        self._due = float("-inf")

    def __call__(self) -> T | None:
        with self._guard:
            if time.monotonic() < self._due:
                return self._value
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._know_now, name="dashboard", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(self._patience_s)
        if self._error is not None:
            raise self._error
        return self._value

    def _know_now(self) -> None:
        began = time.monotonic()
        try:
            self._value, self._error = self._know(), None
        except Exception as error:  # noqa: BLE001 - told to those who wait
            self._error = error
            return
        took = time.monotonic() - began
        self._due = time.monotonic() + max(self._fresh_s, SHARE * took)
