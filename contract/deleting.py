"""A batch that is over and wanted no more: everything that is kept of it goes, its record in the ledger last.

Each step may be repeated, so a deletion that died on the way is done again by the same command: until the record is
gone, the batch is there. Published files and the source go only where that is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import LockError
from redis.lock import Lock

from contract import claimed, logs, stores
from contract.errors import UsageError
from contract.formats import OUTPUT_ENDS
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.merging import set_bits
from contract.paths import Folders
from contract.queues import discard, queue

WAIT_S = 10.0
CHUNK = 1_000


@dataclass(frozen=True)
class Deleted:
    """What went: failed jobs that were kept for a retry, and files."""

    jobs: int
    files: list[str]


def delete(batch: str, ledger: Ledger, folders: Folders, with_files: bool) -> Deleted:
    """Delete a published batch. Raises UsageError for one that is unknown, not over, or being reopened now."""
    lock = ledger.lock(batch, "seal")  # whoever publishes a batch, or reopens it, holds this
    if not lock.acquire(blocking=True, blocking_timeout=WAIT_S):
        raise UsageError(f"batch '{batch}' is being published at this moment: try again")
    try:
        record = deletable(ledger.get(batch), batch)
        jobs = sum(_jobs(record, ledger, lock))
        stores.of(folders, record.spec).clear(batch)
        gone = files(record, folders) if with_files else []
        if with_files:
            _remove(record, folders)
        if not claimed.forget(record.spec, ledger):
            raise UsageError(
                f"batch '{batch}' was opened again meanwhile: `producer status {batch}` shows how it stands"
            )
    except LockError:
        raise UsageError(f"deleting '{batch}' took too long at one step: do it again") from None
    finally:
        with contextlib.suppress(LockError):  # it went with the record
            lock.release()
    logs.get(batch=batch).info("batch_deleted", jobs=jobs, files=len(gone))
    return Deleted(jobs, gone)


def deletable(record: Batch | None, batch: str) -> Batch:
    """The batch, when it is over. Raises UsageError with what to do first."""
    if record is None:
        raise UsageError(f"no batch '{batch}': `producer status` lists them all")
    if record.state is not BatchState.DONE:
        raise UsageError(f"batch '{batch}' is not over: wait for it, or end it with `producer cancel {batch}`")
    return record


def files(record: Batch, folders: Folders) -> list[str]:
    """Where the published files of a batch are, and its source if it is known which of `batch_processed/` that is."""
    store, source = stores.of(folders, record.spec), _source(record, folders)
    return [*map(store.shown, store.there(_published(record))), *([str(source)] if source else [])]


def _published(record: Batch) -> list[str]:
    return [f"{record.spec.output}{end}" for end in OUTPUT_ENDS]


def _source(record: Batch, folders: Folders) -> Path | None:
    source = folders.processed / record.processed if record.processed else None
    return source if source and source.is_file() else None


def _remove(record: Batch, folders: Folders) -> None:
    store = stores.of(folders, record.spec)
    for name in _published(record):
        store.delete(name)
    if source := _source(record, folders):
        source.unlink(missing_ok=True)


def _jobs(record: Batch, ledger: Ledger, lock: Lock) -> Iterator[int]:
    """Delete the jobs that were kept, some at a time; how many of each time."""
    spec = record.spec
    target = queue(ledger.redis, spec.model, spec.priority)
    failed = set_bits(ledger.bitmap(spec.batch, Mark.FAILED))
    while chunk := list(itertools.islice(failed, CHUNK)):
        lock.reacquire()
        yield discard(ledger.redis, target, spec.batch, chunk)
