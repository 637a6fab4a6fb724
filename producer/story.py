"""What became of a batch or of one prompt, and how it stands: the data behind `producer logs`.

The logs tell what happened; ledger, job and published rows tell how it stands, also when the logs are gone. Where
Redis is away the logs alone are told. Changes nothing and prints nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import queues, ranges, sealing
from contract.errors import UsageError
from contract.ledger import Batch, Ledger, Mark
from contract.merging import set_bits
from contract.paths import Folders
from producer import report
from producer.journals import merged


@dataclass(frozen=True)
class Subject:
    """A batch, or one of its prompts."""

    batch: str
    index: int | None = None

    @classmethod
    def of(cls, text: str) -> Subject:
        """`BATCH` or `BATCH:INDEX`. Raises UsageError."""
        batch, colon, index = text.partition(":")
        if colon and not (index.isascii() and index.isdecimal()):
            raise UsageError(f"'{text}': after the colon stands a row's index, a number from 0, such as {batch}:17")
        return cls(batch, int(index) if colon else None)

    def concerns(self, event: dict[str, Any]) -> bool:
        """Is the event about it? What is about a whole batch is about each of its prompts."""
        indices = event.get("indices")
        if isinstance(indices, dict):
            mine = indices.get(self.batch)
            return mine is not None and (self.index is None or ranges.holds(str(mine), self.index))
        if event.get("batch") != self.batch:
            return False
        return self.index is None or event.get("index", self.index) == self.index


def events(subject: Subject, folder: Path, since: float | None) -> Iterator[dict[str, Any]]:
    """What the logs hold of it, in the order of time."""
    needle = json.dumps(subject.batch).encode()
    found = merged(folder, lambda line: needle in line, since)
    return (event for event in found if subject.concerns(event))


def standing(subject: Subject, batch: Batch, ledger: Ledger, folders: Folders) -> dict[str, Any]:
    """How it stands now: of a batch its state and counts, of a prompt how it ended, or where it is.

    Raises UsageError for a row that the batch does not have.
    """
    if subject.index is None:
        return {"state": batch.state.value, **batch.counts.model_dump()}
    total = batch.counts.total
    if total is not None and subject.index >= total:
        raise UsageError(f"batch '{subject.batch}' has {total} rows: the last one's index is {total - 1}")
    if subject.index >= batch.counts.submitted:
        return {"state": "not submitted yet"}
    (mark,) = ledger.marks([(subject.batch, subject.index)])
    if mark is None:
        return _unfinished(subject, ledger)
    return {"state": mark.value, **(_answer if mark is Mark.DONE else _error)(subject, batch, ledger, folders)}


def _unfinished(subject: Subject, ledger: Ledger) -> dict[str, Any]:
    job = queues.whereabouts(ledger.redis, f"{subject.batch}-{subject.index}")
    if job is None:
        return {"state": "lost", "remedy": "a worker's audit queues it again, or `producer doctor --fix`"}
    names = {"queued": "waits", "started": "runs", "scheduled": "waits for its next attempt"}
    return {"state": names.get(str(job.pop("status", "")), "waits"), **job}


def _answer(subject: Subject, batch: Batch, ledger: Ledger, folders: Folders) -> dict[str, Any]:
    """From the output row, without prompt and output."""
    done = ledger.bitmap(subject.batch, Mark.DONE)
    before = sum(1 for index in itertools.takewhile(lambda index: index < (subject.index or 0), set_bits(done)))
    line = next(itertools.islice(report.outputs(batch, done, folders), before, None), None)
    row = json.loads(line) if line else {}
    return {name: row[name] for name in ("id", "worker", "finish_reason", "usage", "timing", "denoise") if name in row}


def _error(subject: Subject, batch: Batch, ledger: Ledger, folders: Folders) -> dict[str, Any]:
    """From the error row, which is also a dead letter's."""
    found = sealing.errors(subject.batch, ledger, folders)
    row = next((row for row in found if row.index == subject.index), None)
    if row is None:
        return {}
    return {"id": row.id, "worker": row.worker, **row.error.model_dump(mode="json")}
