"""File system events as hints that a scan is due. They may be lost, late or missing altogether: scans find all.

Part of `producer.watcher`. Watches the watching too: a dead observer thread or a replaced folder is noticed at the
next `check`.
"""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

from watchdog.events import (
    FileClosedEvent,
    FileCreatedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from producer.notices import Notices

# Not opening and reading: our own looks would wake us for ever.
EVENTS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileModifiedEvent, FileMovedEvent, FileClosedEvent]
RETRY_S = 60.0


class Hints(FileSystemEventHandler):
    """Sets `wake` when something happened in `folder`, or with `recursive` below it."""

    def __init__(self, folder: Path, wake: threading.Event, recursive: bool = False) -> None:
        self.folder = folder
        self.recursive = recursive
        self.wake = wake
        self._observer: BaseObserver | None = None
        self._inode = 0
        self._next_try = 0.0
        self._notices = Notices()

    def check(self) -> None:
        """Start the observer, or start it again if it died or if the folder is not the one it watches."""
        if self._alive() or time.monotonic() < self._next_try:
            return
        self.close()
        try:
            self._start()
            self._notices.clear("observer")
        except OSError as error:
            self._next_try = time.monotonic() + RETRY_S
            self._notices.warn("observer", "no_file_events", folder=str(self.folder), reason=_remedy(error))

    def close(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None and observer.is_alive():
            observer.stop()
            observer.join()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called by the observer's thread."""
        self.wake.set()

    def _start(self) -> None:
        self._inode = self.folder.stat().st_ino
        observer = Observer()
        observer.daemon = True
        observer.schedule(self, str(self.folder), recursive=self.recursive, event_filter=EVENTS)
        observer.start()
        self._observer = observer
        self.wake.set()  # what came before the observer is for a scan to find

    def _alive(self) -> bool:
        if self._observer is None or not self._observer.is_alive():
            return False
        try:
            same = self.folder.stat().st_ino == self._inode
        except FileNotFoundError:
            same = False
        # An emitter ends by itself when its folder is deleted, even if one with the same inode takes its place.
        return same and all(emitter.is_alive() for emitter in self._observer.emitters)


def _remedy(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the system's limit of watches is reached; raise it with `sysctl fs.inotify.max_user_watches=524288`"
    if error.errno == errno.EMFILE:
        return "the system's limit of watchers is reached; raise it with `sysctl fs.inotify.max_user_instances=512`"
    return str(error)
