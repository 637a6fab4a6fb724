"""Outputs in an object store, by any fsspec file system whose objects appear whole: see `contract.stores`.

    {name}.jsonl …                              published files, an object each
    .segments/{batch}/{time}-{writer}-{…}.jsonl rows that have ended, an object for each put, never changed

What is relied on: a put shows the whole object or none, whatever ends the connection; reads and listings see what was
put before them (S3, Google Cloud Storage and Azure promise both). Nothing is renamed, appended to or locked. The
folder `.segments/{batch}` of the shared root stays, empty, as the sign that the batch has segments: so nobody has to
list the bucket to find out that there is nothing to do.

A segment's name begins with its writer's clock, to the nanosecond. That orders rows for the one case in which the
order means something: which of two errors of the same row is its last.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urlsplit
from uuid import uuid4

from contract import paths, segments
from contract.errors import StoreError, UsageError
from contract.jobs import Row
from contract.paths import Folders
from contract.protocols import PACKAGES
from contract.stores import Segment, nothing

AT_A_TIME = 64
"""Segments fetched together, and joined into one local file."""
DELETED_AT_A_TIME = 1_000
KEEP_S = 1.0
"""While a transfer lasts, leases are looked after so often."""

T = TypeVar("T")


def opened(url: str, folders: Folders) -> ObjectStore:
    """The store at a `checked` url. Raises UsageError naming the package that is missing, StoreError."""
    protocol = urlsplit(url).scheme
    if importlib.util.find_spec("fsspec") is None:
        raise UsageError("outputs_url needs fsspec: pip install 'dllm-batch[store]'")
    from fsspec.core import url_to_fs

    try:
        files, base = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = PACKAGES[protocol]
        raise UsageError(f"outputs_url {protocol}://… needs {package} ({error}): pip install {package}") from None
    except Exception as error:  # noqa: BLE001 - each package has errors of its own
        raise StoreError(_told(url, error)) from None
    return (FileStore if protocol == "file" else ObjectStore)(files, base, url, folders)


class ObjectStore:
    """A `Store` on an fsspec file system `files`; `base` is the path of `url` there."""

    def __init__(self, files: Any, base: str, url: str, folders: Folders) -> None:
        self._files = files
        self._base = base.rstrip("/")
        self._url = url
        self._folders = folders

    # Segments

    def segment(self, batch: str, writer: str) -> Segment:
        return ObjectSegment(self, batch, writer)

    def put_segment(self, batch: str, name: str, data: bytes) -> None:
        """Durable when it returns; to repeat it under the same name changes nothing."""
        self._mark(batch)
        self._put_bytes(data, self._path(f".segments/{batch}/{name}"))
        self._mark(batch)  # again: a put that took very long may have met the end of its batch

    def _mark(self, batch: str) -> None:
        paths.make(self._folders.segments / batch)

    @contextlib.contextmanager
    def workplace(self, batch: str) -> Iterator[Path]:
        """Under TMPDIR, and removed afterwards; what a killed process of this machine left there is removed before."""
        start = f"dllm-merge-{re.sub(r'[^A-Za-z0-9.]', '_', socket.gethostname())}-"
        _sweep(Path(tempfile.gettempdir()), start)
        with tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def segments(self, batch: str, workplace: Path, keep: Callable[[], None] = nothing) -> list[Path]:
        found = _meanwhile(lambda: self._segment_paths(batch), keep)
        return [
            self._fetch(found[start : start + AT_A_TIME], workplace / f"{start:09}.jsonl", keep)
            for start in range(0, len(found), AT_A_TIME)
        ]

    def _fetch(self, found: Sequence[str], target: Path, keep: Callable[[], None]) -> Path:
        """Segments one after the other in one local file: a million objects need no million files."""
        pieces = [target.with_name(f"{target.name}.{number}") for number in range(len(found))]
        _meanwhile(lambda: self._get(found, pieces), keep)
        with target.open("wb") as joined:
            for piece in pieces:
                with piece.open("rb") as stream:
                    shutil.copyfileobj(stream, joined, 1 << 20)
                joined.write(b"\n")  # what does not end with a line feed shall spoil no neighbour
                piece.unlink()
        return target

    def clear(self, batch: str, keep: Callable[[], None] = nothing) -> None:
        found = _meanwhile(lambda: self._segment_paths(batch), keep)
        for start in range(0, len(found), DELETED_AT_A_TIME):
            keep()
            with self._trouble():
                self._files.rm(found[start : start + DELETED_AT_A_TIME])
        shutil.rmtree(self._folders.segments / batch, ignore_errors=True)

    def put_aside(self, batch: str) -> str:
        for path in self._segment_paths(batch):
            self._copy(path, self._path(f".orphans/{batch}/{path.rpartition('/')[2]}"))
        self.clear(batch)
        return self.shown(f".orphans/{batch}")

    def _segment_paths(self, batch: str) -> list[str]:
        """In order of their names. An error is never taken for an empty listing: rows would seem lost."""
        with self._trouble():
            try:
                found = self._files.ls(self._path(f".segments/{batch}"), detail=False)
            except FileNotFoundError:
                return []
        names = (path.rpartition("/")[2] for path in found)
        return sorted(
            path for path, name in zip(found, names, strict=True) if name.endswith(".jsonl") and name[0] != "."
        )

    # Published files

    def publish(self, part: Path, name: str, keep: Callable[[], None] = nothing) -> None:
        _meanwhile(lambda: self._put_file(part, self._path(name)), keep)

    def open(self, name: str) -> BinaryIO:
        with self._trouble(FileNotFoundError):
            return io.BufferedReader(_Reading(self._files.open(self._path(name), "rb"), self._trouble), 1 << 20)

    def there(self, names: Iterable[str]) -> list[str]:
        asked = list(names)
        with ThreadPoolExecutor(len(asked) or 1) as pool:
            return [name for name, found in zip(asked, pool.map(self._info, asked), strict=True) if found]

    def size(self, name: str) -> int:
        return int((self._info(name) or {}).get("size") or 0)

    def _info(self, name: str) -> dict[str, Any] | None:
        with self._trouble():
            try:
                found: dict[str, Any] = self._files.info(self._path(name))
            except FileNotFoundError:
                return None
        return found

    def delete(self, name: str) -> None:
        with self._trouble(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def shown(self, name: str) -> str:
        return f"{self._url}/{name}"

    def check(self) -> None:
        """Put, list, read and delete an object. Raises StoreError where one of these is not allowed."""
        with self._trouble():
            name = f"{uuid4().hex}.jsonl"
            path = self._path(f".segments/.check/{name}")
            self._put_bytes(b"{}\n", path)
            if not any(found.endswith(f"/{name}") for found in self._segment_paths(".check")):
                raise StoreError(f"{self._url}: an object that was put there is not listed")
            self._files.cat_file(path)
            self._files.rm_file(path)

    # Transfers

    def _get(self, found: Sequence[str], targets: Sequence[Path]) -> None:
        with self._trouble():
            self._files.get(list(found), [str(target) for target in targets])

    def _put_bytes(self, data: bytes, path: str) -> None:
        with self._trouble():
            self._files.pipe_file(path, data)

    def _put_file(self, file: Path, path: str) -> None:
        with self._trouble():
            self._files.put_file(str(file), path)

    def _copy(self, path: str, target: str) -> None:
        with self._trouble():
            self._files.cp_file(path, target)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}"

    @contextlib.contextmanager
    def _trouble(self, *passing: type[BaseException]) -> Iterator[None]:
        """Each package has errors of its own: all become StoreError, which is met as a full disk is."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if isinstance(error, passing):
                raise
            raise StoreError(_told(self._url, error)) from error


class FileStore(ObjectStore):
    """A folder as an object store: what a store promises of a put is done by a rename and fsync here."""

    def _put_bytes(self, data: bytes, path: str) -> None:
        with self._trouble(), _new(path) as part:
            part.write_bytes(data)

    def _put_file(self, file: Path, path: str) -> None:
        with self._trouble(), _new(path) as part:
            shutil.copyfile(file, part)

    def _copy(self, path: str, target: str) -> None:
        self._put_file(Path(path), target)


class ObjectSegment(Segment):
    """A writer that puts an object for each `append`."""

    def __init__(self, store: ObjectStore, batch: str, writer: str) -> None:
        self._store = store
        self._batch = batch
        self._writer = writer

    def append(self, rows: Sequence[Row]) -> None:
        if rows:
            data = b"".join(map(segments.line, rows))
            self._store.put_segment(self._batch, segment_name(self._writer), data)

    def close(self) -> None:
        pass

    def __enter__(self) -> ObjectSegment:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def segment_name(writer: str) -> str:
    """A name that no other segment has; later ones sort behind."""
    return f"{time.time_ns():019}-{quote(writer, safe='')}-{uuid4().hex[:8]}.jsonl"


class _Reading(io.RawIOBase):
    """An open object; an error while it is read is the store's as well."""

    def __init__(self, stream: Any, trouble: Callable[[], AbstractContextManager[None]]) -> None:
        self._stream = stream
        self._trouble = trouble

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._trouble():
            data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


@contextlib.contextmanager
def _new(path: str) -> Iterator[Path]:
    target = Path(path)
    paths.make(target.parent)
    part = target.with_name(f".{uuid4().hex}.part")
    try:
        yield part
        paths.publish(part, target)
    finally:
        part.unlink(missing_ok=True)


def _meanwhile(work: Callable[[], T], keep: Callable[[], None]) -> T:
    """Do `work` in a thread and call `keep` here until it has ended. When `keep` raises, `work` is left to itself."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            outcome.set_exception(error)

    Thread(target=run, name="transfer", daemon=True).start()
    while not wait([outcome], KEEP_S).done:
        keep()
    return outcome.result()


def _sweep(folder: Path, start: str) -> None:
    """Remove the workplaces whose process is no more."""
    for entry in folder.glob(f"{start}*"):
        pid = entry.name.removeprefix(start).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(entry, ignore_errors=True)
        except (ValueError, PermissionError, OverflowError):
            pass


def _told(url: str, error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{url}: {type(error).__name__}: {text}" if text else f"{url}: {type(error).__name__}"
