"""Folder roles, and the two file operations on which nothing may be lost: publish and move.

All folders stand under one root (`--root`, else `DLLM_ROOT`, else the current folder).
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

DOUBLE_ENDINGS = (".gz", ".yaml")
"""What says only together with the ending before it what a file is: `.csv.gz`, `.params.yaml`."""


@dataclass(frozen=True)
class Folders:
    """Where everything lies, derived from the root."""

    root: Path

    @property
    def inputs(self) -> Path:
        return self.root / "batch_inputs"

    @property
    def claimed(self) -> Path:
        """Sources taken by the producer, one folder a batch: `.claimed/{batch}/{file name}`."""
        return self.inputs / ".claimed"

    @property
    def outputs(self) -> Path:
        return self.root / "batch_outputs"

    @property
    def segments(self) -> Path:
        """Rows not yet published, one folder a batch, one file a writer."""
        return self.outputs / ".segments"

    @property
    def orphans(self) -> Path:
        """Segments of batches that nobody knows, put aside."""
        return self.outputs / ".orphans"

    @property
    def processed(self) -> Path:
        return self.root / "batch_processed"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def redis(self) -> Path:
        return self.root / ".redis"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    def create(self) -> Folders:
        """Make the folders that the pipeline writes to; those that exist stay as they are."""
        for folder in (self.inputs, self.claimed, self.outputs, self.segments, self.processed, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        return self


def fsync_folder(folder: Path) -> None:
    """Make a rename or a new file in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(folder: Path) -> Path:
    """Make `folder` and those above it that are missing, to survive a power cut; returns it."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync_folder(folder.parent)
    return folder


def publish(finished: Path, target: Path) -> None:
    """Put `finished` (closed, same file system) at `target` in one step: readers see all of it or nothing."""
    with finished.open("rb") as stream:
        os.fsync(stream.fileno())
    os.replace(finished, target)
    fsync_folder(target.parent)


def _free_or_same(source: Path, folder: Path) -> Path:
    """`folder/name`, or `folder/stem-2.ext`, `-3` … : the first that is free or already is `source`."""
    candidate, number = folder / source.name, 2
    ending = "".join(source.suffixes[-2:]) if source.suffix in DOUBLE_ENDINGS else source.suffix
    while os.path.lexists(candidate) and not (candidate.exists() and candidate.samefile(source)):
        candidate, number = folder / f"{source.name.removesuffix(ending)}-{number}{ending}", number + 1
    return candidate


def move(source: Path, folder: Path) -> Path:
    """Move `source` into `folder` without ever overwriting; returns where it lies now.

    On one file system a link and an unlink; across file systems copy, fsync, rename, unlink: a crash at any
    instant leaves at least one whole copy, and a link left by such a crash is recognised as the same file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        target = _free_or_same(source, folder)
        if target.exists():
            source.unlink()
            return target
        try:
            os.link(source, target)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            if not _copy_exclusive(source, target):
                continue
        fsync_folder(folder)
        source.unlink()
        return target


def _copy_exclusive(source: Path, target: Path) -> bool:
    """Copy to a hidden neighbour, fsync, then take the target name; False when somebody else took it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as reader, partial.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
        if target.exists():
            return False
        os.rename(partial, target)
        return True
    finally:
        partial.unlink(missing_ok=True)
