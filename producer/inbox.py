"""What lies in `batch_inputs/`, and which of it is ready to be claimed.

Before a prompt's life: people copy, move and save files here, slowly, under temporary names, with all kinds of things
among them. A file is ready when two looks `settle_s` apart find the same size, time and inode. Knows no batches.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from producer.claims import KINDS, Look, is_utf8
from producer.notices import Notices

UNFINISHED = ("~", ".swp", ".swx", ".tmp", ".part", ".partial", ".crdownload", ".download")


class Inbox:
    """Looks at the folder; remembers what it saw and what it said about it."""

    def __init__(self, folder: Path, settle_s: float) -> None:
        self.folder = folder
        self.settle_s = settle_s
        self._seen: dict[str, tuple[Look, float]] = {}
        self._notices = Notices()

    @property
    def unsettled(self) -> bool:
        """Were there files at the last look that may be ready at the next?"""
        return bool(self._seen)

    def look(self) -> list[tuple[Path, Look]]:
        """Files that are ready, the oldest first. A folder that is gone is made again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        seen: dict[str, tuple[Look, float]] = {}
        objections: set[str] = set()
        for name in os.listdir(self.folder):
            if _unfinished(name):
                continue
            try:
                look = Look.at(self.folder / name)
            except FileNotFoundError:
                continue
            if objection := _objection(self.folder / name, look):
                objections.add(f"{name}: {objection}")
                shown = os.fsencode(name).decode("utf-8", "backslashreplace")
                self._notices.warn(f"{name}: {objection}", "file_ignored", file=shown, reason=objection)
                continue
            before, since = self._seen.get(name, (None, now))
            seen[name] = (look, since if look == before else now)
        self._seen = seen
        self._notices.keep(objections)
        ready = [(self.folder / name, look) for name, (look, since) in seen.items() if now - since >= self.settle_s]
        return sorted(ready, key=lambda found: (found[1].mtime_ns, found[0].name))

    def taken(self, file: Path) -> None:
        """`file` is not in the folder any more."""
        self._seen.pop(file.name, None)


def _unfinished(name: str) -> bool:
    """Hidden files and the names under which editors, browsers and copies write what is not complete."""
    return name.startswith((".", "#")) or name.lower().endswith(UNFINISHED)


def _objection(file: Path, look: Look) -> str | None:
    """Why `file` is not input, in words for the user; None when it is."""
    if stat.S_ISLNK(look.mode):
        return "a link; put the file itself here"
    if stat.S_ISDIR(look.mode):
        return "a folder; put its files here"
    if not look.regular:
        return "not a regular file"
    if not is_utf8(file.name):
        return "its name is not UTF-8; rename it"
    if file.suffix.lower() not in KINDS:
        return f"only {' and '.join(KINDS)} files are prompts"
    return None if os.access(file, os.R_OK) else "no permission to read it; looked at again on each scan"
