"""What lies in `batch_inputs/`, and which of it is ready to be claimed.

Before a prompt's life: people copy, move and save files here, slowly, under temporary names, with all kinds of things
among them. A file is ready when two looks `settle_s` apart find the same size, time and inode, of it and of the
parameters beside it. Knows no batches.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from contract.tables import NO_PYARROW, can_read_parquet
from producer import kinds
from producer.claims import Look, is_utf8
from producer.notices import Notices

UNFINISHED = ("~", ".swp", ".swx", ".tmp", ".part", ".partial", ".crdownload", ".download")


class Inbox:
    """Looks at the folder; remembers what it saw and what it said about it."""

    def __init__(self, folder: Path, settle_s: float, recursive: bool = False) -> None:
        self.folder = folder
        self.settle_s = settle_s
        self.recursive = recursive
        self._seen: dict[str, tuple[Look, float]] = {}
        self._params: dict[str, tuple[Look, float]] = {}
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
        params: dict[str, tuple[Look, float]] = {}
        objections: set[str] = set()
        for name in self._names():
            try:
                look = Look.at(self.folder / name)
            except FileNotFoundError:
                continue
            if kinds.is_params(name):
                params[name] = _since(look, self._params.get(name), now)
                continue
            if objection := _objection(self.folder / name, look, self.recursive):
                objections.add(f"{name}: {objection}")
                shown = os.fsencode(name).decode("utf-8", "backslashreplace")
                self._notices.warn(f"{name}: {objection}", "file_ignored", file=shown, reason=objection)
                continue
            seen[name] = _since(look, self._seen.get(name), now)
        self._seen, self._params = seen, params
        self._notices.keep(objections)
        ready = [(self.folder / name, look) for name, (look, _) in seen.items() if self._still(name, now)]
        return sorted(ready, key=lambda found: (found[1].mtime_ns, found[0].name))

    def _names(self, below: str = "") -> Iterator[str]:
        """Paths of what lies in the folder, and with `recursive` in the visible folders below it."""
        try:
            entries = list(os.scandir(self.folder / below))
        except (FileNotFoundError, NotADirectoryError):
            return  # gone meanwhile
        for entry in entries:
            if _unfinished(entry.name):
                continue
            name = os.path.join(below, entry.name)
            if self.recursive and entry.is_dir(follow_symlinks=False) and is_utf8(entry.name):
                yield from self._names(name)
            else:
                yield name

    def _still(self, name: str, now: float) -> bool:
        """Have the file and its parameters stood still for long enough?"""
        beside = self._params.get(str(kinds.params_beside(Path(name))))
        return all(now - since >= self.settle_s for _, since in (self._seen[name], *([beside] if beside else [])))

    def taken(self, file: Path) -> None:
        """`file` is not in the folder any more."""
        self._seen.pop(str(file.relative_to(self.folder)), None)


def _since(look: Look, before: tuple[Look, float] | None, now: float) -> tuple[Look, float]:
    """The look, and since when it has been the same."""
    return look, before[1] if before and before[0] == look else now


def _unfinished(name: str) -> bool:
    """Hidden files and the names under which editors, browsers and copies write what is not complete."""
    return name.startswith((".", "#")) or name.lower().endswith(UNFINISHED)


def _objection(file: Path, look: Look, recursive: bool) -> str | None:
    """Why `file` is not input, in words for the user; None when it is."""
    if stat.S_ISLNK(look.mode):
        return "a link; put the file itself here"
    if stat.S_ISDIR(look.mode):
        return "its name is not UTF-8; rename it" if recursive else "a folder; put its files here, or set recursive"
    if not look.regular:
        return "not a regular file"
    if not is_utf8(file.name):
        return "its name is not UTF-8; rename it"
    kind = kinds.of(file.name)
    if kind is None:
        return f"only {kinds.SHOWN} files are prompts"
    if kind.kind == "parquet" and not can_read_parquet():
        return NO_PYARROW
    return None if os.access(file, os.R_OK) else "no permission to read it; looked at again on each scan"
