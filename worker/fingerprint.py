"""What tells one model's answers from another's: name, arithmetic, and every byte of its files.

Weights are read to their end once. What came of it is remembered beside the answers, under the file's path, size and
time of change, so that later workers, on other machines too, do not read them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from worker.model import HUB_FILES, HUB_PICKLES, Model

FORMAT = 1
"""Rises when the same model would answer the same request differently, or when what is kept of an answer changes."""
DIGEST = 32
"""Bytes of a file's digest."""


def identity(model: Model, remembered: Path) -> bytes:
    """A digest of all that decides about answers beside the request; digests of files are kept in `remembered`."""
    place = model.place()
    del place["device"]  # any worker's answer is as good
    files = {file.name: _digest(file, remembered).hex() for file in sorted(_files(model.folder))}
    told = {"format": FORMAT, "version": metadata.version("dllm-batch"), **place, "files": files}
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=DIGEST).digest()


def _files(folder: Path) -> Iterator[Path]:
    """The files that a checkpoint is read from: a hub's folder may hold others."""
    return (file for pattern in HUB_FILES + HUB_PICKLES for file in folder.glob(pattern))


def _digest(file: Path, remembered: Path) -> bytes:
    found = os.stat(file)
    name = f"{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    note = remembered / hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    try:
        if len(digest := note.read_bytes()) == DIGEST:
            return digest
    except FileNotFoundError:
        pass
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST)).digest()
    remembered.mkdir(parents=True, exist_ok=True)
    part = note.with_name(f".{note.name}.{os.getpid()}.part")
    part.write_bytes(digest)
    os.replace(part, note)
    return digest
