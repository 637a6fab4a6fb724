"""The other end of a prompt's life: it is not wanted any more.

A cancelled row ends like any other, once: whichever mark comes first stands, a worker's or this one. In one step the
row is marked, its job deleted, its place in the queue and its lease taken away; a worker that runs it finds that at
its next heartbeat, or at the fence. Its error row, code `cancelled`, is on the disk before, as every row is.

That a whole batch is cancelled is written down first. From then on nothing more of its source is submitted, and if we
die on the way, the audit goes on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from contract import logs, sealing, stores
from contract.jobs import ErrorCode, ErrorDetail, ErrorRow, PromptJob, shown
from contract.ledger import Batch, BatchState, Ledger
from contract.merging import clear_bits, union
from contract.paths import Folders
from contract.queues import prompts, queue, withdraw
from contract.ranges import written
from contract.stores import Segment

CHUNK = 2_000
"""Rows ended in one step: their prompts are held in memory, and the queue's lists are walked through once."""


@dataclass
class Cancelled:
    """What came of it: rows ended by this call, asked-for ids that name no row which waits or runs, and whether the
    batch was published by it."""

    rows: int = 0
    unknown: list[str] = field(default_factory=list)
    published: bool = False


def cancel(batch: str, ledger: Ledger, folders: Folders) -> Cancelled:
    """End every row of a batch that has not ended, stop its submitting, publish what is done.

    Does nothing to a batch that has ended or is unknown.
    """
    known = ledger.get(batch)
    store = stores.of(folders, known.spec) if known else None
    if store is None or not ledger.stop(batch):
        return Cancelled()
    record = ledger.get(batch)
    assert record is not None
    count = 0
    with store.segment(batch, _writer()) as segment:
        for chunk in _chunks(_left(record, ledger)):
            count += _end(record, chunk, prompts(ledger.redis, batch, chunk), segment, ledger)
    if count:
        logs.get(batch=batch).info("batch_cancelled", rows=count)
    return Cancelled(count, published=sealing.seal(batch, ledger, folders))


def cancel_rows(batch: str, ids: Collection[str], ledger: Ledger, folders: Folders) -> Cancelled:
    """End those rows of a batch that have one of `ids` and have not ended; the others go on."""
    record = ledger.get(batch)
    if record is None or record.state is BatchState.DONE:
        return Cancelled(unknown=sorted(ids))
    wanted, count = set(ids), 0
    unknown = set(ids)
    with stores.of(folders, record.spec).segment(batch, _writer()) as segment:
        for chunk in _chunks(_left(record, ledger)):
            found = {job.index: job for job in prompts(ledger.redis, batch, chunk) if job and job.id in wanted}
            unknown -= {job.id for job in found.values()}
            count += _end(record, list(found), list(found.values()), segment, ledger)
    if count:
        logs.get(batch=batch).info("batch_cancelled", rows=count)
    return Cancelled(count, sorted(unknown), sealing.seal(batch, ledger, folders))


def _left(record: Batch, ledger: Ledger) -> list[int]:
    """The rows that were submitted and have not ended."""
    return list(clear_bits(union(ledger.bitmaps(record.spec.batch).values()), record.counts.submitted))


def _chunks(rows: list[int]) -> Iterator[list[int]]:
    return (rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK))


def _end(
    record: Batch,
    indices: Sequence[int],
    jobs: Sequence[PromptJob | None],
    segment: Segment,
    ledger: Ledger,
) -> int:
    """Write the rows, then mark those that have not ended by now; returns how many."""
    if not indices:
        return 0
    spec = record.spec
    segment.append([_row(index, job) for index, job in zip(indices, jobs, strict=True)])
    target = queue(ledger.redis, spec.model, spec.priority)
    keys = [*ledger.mark_keys(spec.batch), ledger.key(spec.batch, "starts")]
    count = withdraw(ledger.redis, target, spec.batch, keys, indices)
    logs.get(batch=spec.batch).info("rows_cancelled", indices={spec.batch: written(indices)}, rows=count)
    return count


def _row(index: int, job: PromptJob | None) -> ErrorRow:
    message = "cancelled before it had an answer"
    detail = ErrorDetail(code=ErrorCode.CANCELLED, message=message, at=round(time.time(), 3))
    if job is None:  # Redis lost it
        return ErrorRow(index=index, id=str(index), line=0, prompt=None, error=detail)
    told = {"id": job.id, "line": job.line, "prompt": shown(job.asked), "metadata": job.metadata}
    return ErrorRow.model_validate({"index": index, **told, "error": detail})


def _writer() -> str:
    return f"cancel-{socket.gethostname()}-{os.getpid()}"
