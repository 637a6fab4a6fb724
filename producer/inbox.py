"""What lies in `batch_inputs/`, and which of it is ready to be claimed.

Before a prompt's life: people copy, move and save files here, slowly, under temporary names, with all kinds of things
among them. A file is ready when two looks `settle_s` apart find the same size, time and inode, of it and of the
parameters beside it, and nobody has it open for writing as far as the system tells. Knows no batches.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from contract.tables import NO_PYARROW, can_read_parquet
from producer import kinds
from producer.claims import Look, is_utf8
from producer.notices import Notices

UNFINISHED = ("~", ".swp", ".swx", ".tmp", ".part", ".partial", ".crdownload", ".download")
LONG_S = 60.0
"""A file that is still being written after this long is spoken of."""


class Seen(NamedTuple):
    """A file at the last look, since when it has looked so, and since when it has been there; monotonic seconds."""

    look: Look
    still_since: float
    since: float


class Inbox:
    """Looks at the folder; remembers what it saw and what it said about it."""

    def __init__(self, folder: Path, settle_s: float, recursive: bool = False) -> None:
        self.folder = folder
        self.settle_s = settle_s
        self.recursive = recursive
        self._seen: dict[str, Seen] = {}
        self._params: dict[str, Seen] = {}
        self._notices = Notices()

    @property
    def unsettled(self) -> bool:
        """Were there files at the last look that may be ready at the next?"""
        return bool(self._seen)

    def look(self) -> list[tuple[Path, Look]]:
        """Files that are ready, the oldest first. A folder that is gone is made again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        now = time.monotonic()
        seen: dict[str, Seen] = {}
        params: dict[str, Seen] = {}
        objections: set[str] = set()
        for name in self._names():
            try:
                look = Look.at(self.folder / name)
            except FileNotFoundError:
                continue
            if kinds.is_params(name):
                params[name] = _seen(look, self._params.get(name), now)
                continue
            if objection := _objection(self.folder / name, look, self.recursive):
                objections.add(f"{name}: {objection}")
                shown = os.fsencode(name).decode("utf-8", "backslashreplace")
                self._notices.warn(f"{name}: {objection}", "file_ignored", file=shown, reason=objection)
                continue
            seen[name] = _seen(look, self._seen.get(name), now)
        self._seen, self._params = seen, params
        ready = {name for name in seen if self._still(name, now) and not _being_written(self.folder / name)}
        self._notices.keep(objections | self._told_of_long_writing(seen.keys() - ready, now))
        found = [(self.folder / name, seen[name].look) for name in ready]
        return sorted(found, key=lambda one: (one[1].mtime_ns, one[0].name))

    def _told_of_long_writing(self, names: Iterable[str], now: float) -> set[str]:
        """Keys of the notices about those of `names` that have been written for long."""
        told = {f"{name}: written": name for name in names if now - self._seen[name].since > LONG_S}
        for key, name in told.items():
            self._notices.warn(key, "file_being_written", file=name)
        return set(told)

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
        return all(now - one.still_since >= self.settle_s for one in (self._seen[name], *([beside] if beside else [])))

    def taken(self, file: Path) -> None:
        """`file` is not in the folder any more."""
        self._seen.pop(str(file.relative_to(self.folder)), None)


def _seen(look: Look, before: Seen | None, now: float) -> Seen:
    if before is None:
        return Seen(look, now, now)
    return before if before.look == look else Seen(look, now, before.since)


def _being_written(file: Path) -> bool:
    """Has a process of this machine the file open for writing? False where the system does not tell.

    A copy may stand still for longer than any `settle_s`. Linux gives a lease for reading only on a file that nobody
    writes; we give it back at once. Whoever opens the file in between waits for that, and the kernel sends us a signal:
    one that is ignored by default, in place of the one that would end the process.
    """
    if not hasattr(fcntl, "F_SETLEASE"):
        return False
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:  # a file system without leases, or a file of somebody else
        return error.errno == errno.EAGAIN
    finally:
        os.close(descriptor)
    return False


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
