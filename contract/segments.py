"""After the engine, before publishing: rows that have ended, kept until their batch is complete.

A segment is `batch_outputs/.segments/{batch}/{writer}.jsonl`: one JSON row a line, appended by one process only and
durable when `append` returns. Nothing here needs Redis: a row is in a segment first and marked in the ledger after.
A line that a crash or a full disk tore is never read as a row and never spoils its neighbours.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from pydantic_core import PydanticSerializationError

from contract.jobs import ErrorCode, Row
from contract.ledger import Mark
from contract.paths import Folders, fsync_folder


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """Where a row lies in its segment: byte offset and length of its line, the line feed not counted."""

    index: int
    offset: int
    length: int
    kind: Mark


class SegmentWriter:
    """The one writer of one segment. Opened at the first append, and again if publishing took the file away."""

    def __init__(self, folders: Folders, batch: str, writer: str) -> None:
        self.folder = folders.segments / batch
        self.writer = quote(writer, safe="")
        self._descriptor: int | None = None
        self._end = 0
        """Bytes of the file that are known to be whole rows; what lies beyond was torn."""

    def append(self, rows: Sequence[Row]) -> None:
        """Write `rows` and return once they are on the disk: one fsync for all of them.

        Raises OSError (a full disk, say); then none of `rows` counts as written, and earlier rows are untouched.
        """
        if not rows:
            return
        data = b"".join(line(row) for row in rows)
        descriptor = self._opened()
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        except OSError:
            self._drop_torn(descriptor)
            raise
        self._end += len(data)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> int:
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self.close()  # the batch was published and its segments removed; a retried row begins a new one
        if self._descriptor is None:
            descriptor = self._open()
            try:
                self._end = _end_on_fresh_line(descriptor)
            except OSError:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._descriptor

    def _open(self) -> int:
        """Our file, or the next free name if another living process uses our writer name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            name = f"{self.writer}.jsonl" if number == 1 else f"{self.writer}.{number}.jsonl"
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except OSError:
                pass  # a file system without locks; writer names are unique there by their host and process id
            fsync_folder(self.folder)
            fsync_folder(self.folder.parent)
            return descriptor
        raise AssertionError("unreachable")

    def _drop_torn(self, descriptor: int) -> None:
        """Cut the file back to its last whole row; where even that fails, the next append starts a fresh line."""
        try:
            os.ftruncate(descriptor, self._end)
        except OSError:
            self.close()


def line(row: Row) -> bytes:
    """The row's line. `index` comes first, which publishing relies on."""
    try:
        text = row.model_dump_json().encode()
    except (PydanticSerializationError, UnicodeEncodeError):  # half a surrogate pair has no UTF-8, but a JSON escape
        text = json.dumps(row.model_dump(mode="python"), default=str).encode()
    return text + b"\n"


def files(folder: Path) -> list[Path]:
    """The segments of one batch's folder, the longest untouched first; none when the folder is missing."""
    try:
        return sorted(folder.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    except FileNotFoundError:
        return []


def rows(path: Path) -> Iterator[SegmentRow]:
    """The whole rows of a segment in the order in which they were written; torn and foreign lines are passed over."""
    offset = 0
    with path.open("rb") as stream:
        for text in stream:
            row = parse(text)
            if row is not None:
                yield SegmentRow(row["index"], offset, len(text) - 1, _kind(row))
            offset += len(text)


def _kind(row: dict[str, Any]) -> Mark:
    if "output" in row:
        return Mark.DONE
    error = row["error"]
    cancelled = isinstance(error, dict) and error.get("code") == ErrorCode.CANCELLED
    return Mark.CANCELLED if cancelled else Mark.FAILED


def parse(text: bytes) -> dict[str, Any] | None:
    """The row on a line, or None when the line is not a whole row. A line without its line feed is a torn one."""
    if not text.endswith(b"\n"):
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("index")) is not int or row["index"] < 0:
        return None
    return row if ("output" in row) != ("error" in row) else None


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _end_on_fresh_line(descriptor: int) -> int:
    """Close a line torn by a crash with a line feed, so that it stays invalid; returns the file's length."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        _write_all(descriptor, b"\n")
        size += 1
    return size
