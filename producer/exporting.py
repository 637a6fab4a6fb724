"""A published batch in another form, after the fact: what `output_format` would have published beside the JSON lines.

Reads what was published and changes nothing of it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contract import formats, paths, sealing
from contract.errors import UsageError
from contract.jobs import OutputFormat
from contract.ledger import Batch, BatchState, Ledger
from contract.paths import Folders

ERRORS = ".errors"


class Lines:
    """JSON lines of all rows of the input in its order, whether answered or not."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._stream = part.open("w", encoding="utf-8", errors="backslashreplace")

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._stream.close()

    def files(self) -> Iterator[tuple[str, Path | None]]:
        yield ".jsonl", self._part


def export(batch: Batch, form: OutputFormat, target: Path, ledger: Ledger, folders: Folders) -> tuple[int, list[Path]]:
    """Write a batch's rows to `target` in one step, and OpenAI's error file beside it; how many rows, and the files.

    Raises UsageError for a batch that is not published, or whose files are not as they were published.
    """
    if batch.state is not BatchState.DONE:
        raise UsageError(
            f"batch '{batch.spec.batch}' is not published yet: `producer results` gives what is done so far"
        )
    formats.require(form)
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        count, parts = _written(batch, form, Path(folder), ledger, folders)
        placed = [(part, _place(end, target)) for end, part in parts if part is not None]
        for part, place in placed:
            paths.publish(part, place)
    return count, [place for _, place in placed]


def _written(
    batch: Batch, form: OutputFormat, folder: Path, ledger: Ledger, folders: Folders
) -> tuple[int, list[tuple[str, Path | None]]]:
    spec = batch.spec.model_copy(update={"output_format": form})
    count = 0
    with formats.opened(spec, folder, batch.started_at or spec.created_at) as chosen:
        opened: formats.Form = Lines(folder / "lines.part") if form == "jsonl" else chosen
        for index, text in sealing.rows(batch, ledger, folders):
            opened.add(index, json.loads(text))
            count += 1
        if opened is not chosen:
            opened.close()
    return count, list(opened.files())


def _place(end: str, target: Path) -> Path:
    return target.with_name(f"{target.stem}{ERRORS}{target.suffix}") if ERRORS in end else target
