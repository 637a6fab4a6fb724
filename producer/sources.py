"""What the words after `producer submit` mean: files, folders, patterns, and `-` for standard input."""

from __future__ import annotations

import glob
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from contract.errors import UsageError, nearest
from contract.tables import NO_PYARROW, can_read_parquet
from producer import kinds
from producer.claims import HERE, is_utf8

STDIN = Path("-")
STDIN_STEM = "stdin"
POLL_S = 0.1
PIECE = 1 << 20


def find(words: Sequence[Path], recursive: bool) -> dict[Path, Path]:
    """The files that are meant, each once, those of a folder or a pattern by name; for each the folder of its outputs.

    Raises UsageError.
    """
    found: dict[Path, Path] = {}
    for word in words:
        for file in _meant(word, recursive):
            if file != STDIN:
                _refuse_unreadable(file)
            found.setdefault(file, file.parent.relative_to(word) if recursive and word.is_dir() else HERE)
    return found


def _meant(word: Path, recursive: bool) -> list[Path]:
    if word == STDIN or word.is_file():
        return [word]
    if word.is_dir():
        files = _inside(word, recursive)
        if not files:
            raise UsageError(f"{word}: no {kinds.SHOWN} files in it{'' if recursive else ' (--recursive: nor below)'}")
        return files
    if not word.exists() and glob.has_magic(str(word)):
        matches = sorted(glob.glob(str(word), recursive=True))
        files = [Path(match) for match in matches if kinds.of(match) is not None and os.path.isfile(match)]
        if not files:
            raise UsageError(f"{word}: no {kinds.SHOWN} file matches")
        return files
    if not word.exists():
        raise UsageError(f"{word}: no such file")
    raise UsageError(f"{word}: not a file")


def _inside(folder: Path, recursive: bool) -> list[Path]:
    """Visible files of prompts in `folder`, and in those below it."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if not entry.name.startswith(".") and kinds.of(entry.name) and entry.is_file()]
    below = [entry for entry in entries if entry.is_dir() and not entry.is_symlink() and entry.name[0] != "."]
    return [*files, *(file for one in below for file in _inside(one, recursive))] if recursive else files


def _refuse_unreadable(file: Path) -> None:
    kind = kinds.of(file.name)
    if kind is None:
        raise UsageError(f"{file}: unknown kind of file; rename it to end in {', '.join(kinds.ENDINGS)}")
    if not os.access(file, os.R_OK):
        raise UsageError(f"{file}: no permission to read it")
    if not is_utf8(str(file)):
        raise UsageError(f"{file}: its name is not UTF-8; rename it")
    if kind.kind == "parquet" and not can_read_parquet():
        raise UsageError(f"{file}: {NO_PYARROW}")


def stdin_name(name: str | None, ending: str) -> str:
    """What a batch's source is called that came in on standard input. Raises UsageError for an unknown ending."""
    dotted = f".{ending.removeprefix('.')}"
    if dotted not in kinds.ENDINGS:
        known = [end[1:] for end in kinds.ENDINGS]
        raise UsageError(f"--input-format must be one of {', '.join(known)}{nearest(ending, known)}")
    if dotted == ".parquet" and not can_read_parquet():
        raise UsageError(f"--input-format parquet: {NO_PYARROW}")
    return f"{name or STDIN_STEM}{dotted}"


def stdin(stop: Callable[[], bool]) -> Iterator[bytes]:
    """Standard input piece by piece. Raises KeyboardInterrupt when `stop` says so: a part of it is nobody's batch."""
    descriptor = sys.stdin.fileno()
    while True:
        while not select.select([descriptor], [], [], POLL_S)[0]:
            if stop():
                raise KeyboardInterrupt
        if stop():
            raise KeyboardInterrupt
        if not (piece := os.read(descriptor, PIECE)):
            return
        yield piece
