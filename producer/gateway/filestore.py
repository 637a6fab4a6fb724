"""Uploaded files on the disk, a folder each: `batch_files/{id}/` with the file and `meta.json`, what is known of it.

A file is complete when its folder has its name, which it gets by rename; ids begin with the time, so their order is
that of creation. Every call here may wait for the disk: it belongs into a thread. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from contract import logs
from contract.paths import fsync_folder
from producer.claims import output_stem

META = "meta.json"
PART = ".part"
ID = re.compile(r"file-[0-9a-f]{28}")
LONGEST_NAME = 255
ABANDONED_S = 86_400.0


class Stored(BaseModel):
    """A file; `owner` is the name of the key that brought it, and no other key sees it.

    `place` is where it lies; of a file that came of a batch, below the place of outputs.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    place: Path


class Receiving:
    """A file on its way to the disk; `keep` or `discard` it."""

    def __init__(self, folder: Path, filename: str) -> None:
        self.filename = filename[:LONGEST_NAME]
        self.id = f"file-{int(time.time() * 1000):012x}{secrets.token_hex(8)}"
        self._folder = folder / f".{self.id}{PART}"
        self._folder.mkdir(parents=True)
        self._target = folder / self.id
        self._file = self._folder / f"{output_stem(Path(self.filename).stem)}.jsonl"
        self._stream = self._file.open("wb")

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def keep(self, owner: str, purpose: str) -> Stored:
        """The file is whole: it is on the disk when this returns."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        stored = Stored(
            id=self.id,
            owner=owner,
            filename=self.filename,
            purpose=purpose,
            bytes=self._stream.tell(),
            created_at=time.time(),
            place=Path(self._file.name),
        )
        self._stream.close()
        with (self._folder / META).open("w", encoding="utf-8") as meta:
            meta.write(stored.model_dump_json())
            meta.flush()
            os.fsync(meta.fileno())
        fsync_folder(self._folder)
        os.rename(self._folder, self._target)
        fsync_folder(self._target.parent)
        return stored.model_copy(update={"place": self._target / stored.place})

    def discard(self) -> None:
        """Does nothing to a file that was kept."""
        self._stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class FileStore:
    """All files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def receive(self, filename: str) -> Receiving:
        return Receiving(self._folder, filename)

    def get(self, file_id: str, owner: str) -> Stored | None:
        """None for a file that is not there, or is another's."""
        if not ID.fullmatch(file_id):
            return None
        try:
            stored = Stored.model_validate_json((self._folder / file_id / META).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            logs.get().warning("upload_unreadable", file=file_id, reason=str(error))
            return None
        if stored.owner != owner:
            return None
        return stored.model_copy(update={"place": self._folder / file_id / stored.place.name})

    def newest_first(self, owner: str) -> Iterator[Stored]:
        names = sorted((name for name in _names(self._folder) if ID.fullmatch(name)), reverse=True)
        return (stored for name in names if (stored := self.get(name, owner)))

    def delete(self, stored: Stored) -> None:
        """Gone at once for whoever looks, whatever is left on the disk by a crash."""
        hidden = self._folder / f".{stored.id}{PART}"
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            os.rename(self._folder / stored.id, hidden)
            fsync_folder(self._folder)
        shutil.rmtree(hidden, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what crashes left half written."""
        for name in _names(self._folder):
            place = self._folder / name
            with contextlib.suppress(FileNotFoundError):  # it was not abandoned after all
                if name.endswith(PART) and time.time() - place.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(place, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
