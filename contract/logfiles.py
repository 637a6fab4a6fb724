"""Files of lines that many processes append to: rotated by size and age, compressed, and kept for a while.

Knows nothing of what the lines say. A line is one write to a file opened for appending, so lines of several processes
do not mix. Whoever finds the file full or old renames it, under a lock; the others notice by its inode, and go on in
the new one. A disk that takes no line stops nobody: lines are counted as lost until one is taken again.

    {name}.jsonl                            what is written now
    {name}.20261202T143000123456.jsonl      rotated at that time (UTC); the newest one is left as it is, because
                                            somebody may be just about to write to it
    {name}.20261201T020000654321.jsonl.gz   the older ones
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROTATING, TIDYING = ".rotate.lock", ".tidy.lock"
APART = {"audit"}
"""Names whose files have limits of their own: nobody else's tidying touches them."""
STALE_PART_S = 3600.0
_NAME = re.compile(r"(?P<stem>.+?)(?:\.(?P<stamp>\d{8}T\d{12}))?\.jsonl(?P<gz>\.gz)?")


@dataclass(frozen=True)
class Limits:
    """When a file is rotated, and how long what was rotated is kept: it goes when it is older than `keep_s`, and the
    oldest go while all that `tidy` looks after takes more than `keep_bytes`."""

    max_bytes: int
    max_age_s: float
    keep_s: float
    keep_bytes: int


@dataclass(frozen=True)
class Found:
    """A file of lines: of which name, and when it was rotated ('' for the one that is written now)."""

    path: Path
    stem: str
    stamp: str
    modified: float
    size: int

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".gz"


class LogFile:
    """The end of one file at which this process writes. For one thread at a time."""

    def __init__(self, path: Path, limits: Limits, locked: bool = False) -> None:
        """`locked`: each line is written under a lock, for a file that several hosts share."""
        self.path = path
        self.limits = limits
        self._locked = locked
        self._descriptor: int | None = None
        self._inode = 0
        self._born = 0.0
        self._torn = False
        self.lost = 0
        """Lines that the disk did not take since one was taken."""

    def write(self, line: str) -> bool:
        """Append a line, its line feed included; False when the disk does not take it."""
        data = line.encode("utf-8", errors="backslashreplace")
        try:
            self._make_ready(len(data))
            with _flocked(self._descriptor) if self._locked else contextlib.nullcontext():
                self._append(b"\n" + data if self._torn else data)
        except OSError:
            self.lost += 1
            return False
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, data: bytes) -> None:
        assert self._descriptor is not None
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
            self._torn = bool(left)

    def _make_ready(self, size: int) -> None:
        """Have the file open that is to be written now."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if self._descriptor is None or found is None or found.st_ino != self._inode:
            self._open()
            found = os.stat(self.path)
        full = found.st_size > 0 and found.st_size + size > self.limits.max_bytes
        if full or (found.st_size > 0 and time.time() - self._born > self.limits.max_age_s):
            self._rotate()

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        found = os.fstat(self._descriptor)
        self._inode = found.st_ino
        self._born = _first_time(self.path) or time.time()
        self._torn = bool(found.st_size) and os.pread(self._descriptor, 1, found.st_size - 1) != b"\n"

    def _rotate(self) -> None:
        with _lock(self.path.parent / ROTATING, wait=True):
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path).st_ino == self._inode:  # else somebody did it just now
                    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
                    os.rename(self.path, self.path.with_name(f"{self.path.stem}.{stamp}.jsonl"))
            self._open()
        tidy_soon(self.path.parent, self.limits, self.path.stem)


def listed(folder: Path) -> list[Found]:
    """The files of lines in `folder`; of one that is being compressed only the whole one."""
    found: dict[tuple[str, str], Found] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            name = _NAME.fullmatch(entry.name)
            with contextlib.suppress(FileNotFoundError):
                if name and not entry.name.startswith(".") and entry.is_file():
                    stat = entry.stat()
                    one = Found(Path(entry.path), name["stem"], name["stamp"] or "", stat.st_mtime, stat.st_size)
                    if (one.stem, one.stamp) not in found or not one.compressed:
                        found[one.stem, one.stamp] = one
    return sorted(found.values(), key=lambda one: (one.stem, one.stamp or "~"))


def lines(path: Path) -> Generator[bytes, None, None]:
    """The lines of a file, compressed or not; also of one that was compressed since it was listed. A torn end of a
    compressed file ends it."""
    if path.suffix != ".gz":
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
            yield from stream
            return
        path = path.with_name(f"{path.name}.gz")
    with contextlib.suppress(FileNotFoundError, EOFError, gzip.BadGzipFile), gzip.open(path) as packed:
        yield from packed


def tidy_soon(folder: Path, limits: Limits, stem: str) -> threading.Thread:
    """`tidy` in a thread of its own: to compress takes seconds, and whoever logs has better things to do."""
    thread = threading.Thread(target=_tidy_quietly, args=(folder, limits, stem), name="tidy-logs", daemon=True)
    thread.start()
    return thread


def _tidy_quietly(folder: Path, limits: Limits, stem: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, say; the next rotation tries again
        tidy(folder, limits, stem)


def tidy(folder: Path, limits: Limits, stem: str) -> None:
    """Compress what was rotated, and remove what is too old or too much. One process at a time; others do nothing.

    All files but those APART, whose processes may be dead; of a `stem` that is apart, its own.
    """

    def ours() -> list[Found]:
        return [one for one in listed(folder) if (one.stem == stem if stem in APART else one.stem not in APART)]

    with _lock(folder / TIDYING, wait=False) as alone:
        if alone:
            _sweep_parts(folder)
            _compress(ours())
            _prune(ours(), limits)


def _compress(files: list[Found]) -> None:
    newest = {one.stem: one.stamp for one in files if one.stamp}
    for one in files:
        if one.stamp and not one.compressed and one.stamp != newest[one.stem]:
            target = one.path.with_name(f"{one.path.name}.gz")
            part = target.with_name(f".{target.name}.part")
            with one.path.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(plain, packed, 1 << 20)
            os.utime(part, (one.modified, one.modified))
            os.replace(part, target)
            one.path.unlink()


def _prune(files: list[Found], limits: Limits) -> None:
    oldest_first = sorted(files, key=lambda one: one.modified)
    total = sum(one.size for one in oldest_first)
    for one in oldest_first:
        if time.time() - one.modified > limits.keep_s or (total > limits.keep_bytes and one is not oldest_first[-1]):
            one.path.unlink(missing_ok=True)
            total -= one.size


def _sweep_parts(folder: Path) -> None:
    for part in folder.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > STALE_PART_S:
                part.unlink()


def _first_time(path: Path) -> float | None:
    """When the file's first line was written, as far as that can be told."""
    try:
        with path.open("rb") as stream:
            return datetime.fromisoformat(json.loads(stream.readline(1 << 20))["timestamp"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _lock(path: Path, wait: bool) -> Iterator[bool]:
    """Within it nobody else has the lock; False when somebody does, and we do not `wait`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        yield _flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _flocked(descriptor: int | None) -> Iterator[None]:
    assert descriptor is not None
    _flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _flock(descriptor, fcntl.LOCK_UN)


def _flock(descriptor: int, how: int) -> bool:
    """False when somebody else has the lock. On a file system without locks everybody has it."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
