"""Submitting again what was submitted before: only what has no output runs again.

Failed rows are queued as `producer retry` does it; cancelled ones, whose jobs are gone, are read again from the file,
which has the same content. Rows that wait or run are left alone, and so are those that could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contract import sealing
from contract.errors import UsageError
from contract.jobs import PromptJob
from contract.ledger import Batch, BatchSpec, Cursor, Ledger
from contract.parser import parse
from contract.paths import Folders
from producer.report import source


@dataclass(frozen=True)
class Resumed:
    """How the batch stood when it was submitted again, and how many of its rows were queued again."""

    batch: Batch
    queued: int

    @property
    def left(self) -> int:
        """Rows that wait or run, without those queued now."""
        return self.batch.counts.submitted - self.batch.counts.ended


def resume(batch: Batch, file: Path | None, max_line_bytes: int, ledger: Ledger, folders: Folders) -> Resumed:
    """Queue the batch's failed and cancelled rows again; `file` has the content of its source, None for the source.

    Raises UsageError where that cannot be now: it is being cancelled or published, or its files were changed or moved.
    """
    name = batch.spec.batch
    if batch.being_cancelled:
        raise UsageError(f"batch '{name}' has the same content and is being cancelled: try again, or use --force")
    queued = 0
    if batch.counts.failed:
        queued += sealing.retry(name, None, ledger, folders, ledger.redis)
    if batch.counts.cancelled:
        jobs = _jobs(file or source(batch, folders), batch.spec, max_line_bytes)
        queued += sealing.reinstate(name, jobs, ledger, folders)
    return Resumed(batch, queued)


def _jobs(file: Path, spec: BatchSpec, max_line_bytes: int) -> Iterator[PromptJob]:
    with file.open("rb") as stream:
        for parsed in parse(stream, spec, Cursor(), max_line_bytes):
            if isinstance(parsed.row, PromptJob):
                yield parsed.row
