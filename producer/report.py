"""How batches stand and what came of them: the data behind `status`, `results` and `failed`.

Reads the ledger, the queues and the output folders, changes nothing and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contract import logs, queues, sealing, turns
from contract.errors import UsageError, nearest
from contract.hours import closed_until
from contract.jobs import ErrorCode, ErrorRow, Priority
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.merging import Merge, set_bits, without_index
from contract.paths import Folders

KNOWN = 1_000
"""Batches among which the nearest to a mistyped id is sought."""


class BatchReport(BaseModel):
    """One batch, for people and scripts. Times in seconds, `rate` in done rows a second since the batch began.

    `waits_until` is set while rows wait for the batch's hours: when they may run next.
    """

    model_config = ConfigDict(frozen=True)

    batch: str
    source: str
    model: str
    priority: Priority
    window: str | None
    state: BatchState
    waits_until: float | None
    total: int | None
    submitted: int
    done: int
    failed: int
    cancelled: int
    created_at: float
    finished_at: float | None
    cancelled_at: float | None
    unread: bool
    elapsed_s: float
    rate: float
    eta_s: float | None
    files: list[str]


class QueueReport(BaseModel):
    """Prompts of one model and priority that wait in Redis."""

    model_config = ConfigDict(frozen=True)

    model: str
    priority: Priority
    waiting: int


class WorkerReport(BaseModel):
    """A living worker; `heartbeat_age_s` is how long ago it gave a sign."""

    model_config = ConfigDict(frozen=True)

    name: str
    state: str
    queues: list[str]
    heartbeat_age_s: float | None


class SystemReport(BaseModel):
    """Everything at a glance, the newest batch first."""

    model_config = ConfigDict(frozen=True)

    batches: list[BatchReport]
    queues: list[QueueReport]
    workers: list[WorkerReport]


def find(batch: str, ledger: Ledger) -> Batch:
    """The batch of that id. Raises UsageError naming the nearest known one."""
    found = ledger.get(batch)
    if found is None:
        raise UsageError(f"no batch '{batch}'{_nearest(batch, ledger)}: `producer status` lists them")
    return found


def _nearest(batch: str, ledger: Ledger) -> str:
    """The hint for a mistyped id, or for one of which only the file's name was remembered."""
    known = [other.spec.batch for other in ledger.newest(KNOWN)]
    if hint := nearest(batch, known):
        return hint
    stems = {name.rsplit("-", 1)[0]: name for name in reversed(known)}
    hint = nearest(batch, stems)
    return next((hint.replace(f"'{stem}'", f"'{name}'") for stem, name in stems.items() if f"'{stem}'" in hint), "")


def system(ledger: Ledger, folders: Folders, model: str, count: int = 100) -> SystemReport:
    """The newest `count` batches, the queues of their models and of `model`, and all workers."""
    batches = ledger.newest(count)
    models = sorted({model, *(batch.spec.model for batch in batches if batch.state is not BatchState.DONE)})
    return SystemReport(
        batches=batch_reports(batches, ledger, folders),
        queues=[
            QueueReport(model=name, priority=priority, waiting=waiting)
            for name in models
            for priority, waiting in queues.depths(ledger.redis, name).items()
        ],
        workers=[_worker(info) for info in queues.workers(ledger.redis)],
    )


def batch_reports(batches: Sequence[Batch], ledger: Ledger, folders: Folders) -> list[BatchReport]:
    """How batches stand now."""
    waits = _waits_until(batches, ledger)
    return [_report(batch, waits.get(batch.spec.batch), folders) for batch in batches]


def _waits_until(batches: Sequence[Batch], ledger: Ledger) -> dict[str, float]:
    """When those open next that have rows waiting outside their hours."""
    hours = {one.spec.batch: one.spec.hours for one in batches if one.spec.hours and one.state is not BatchState.DONE}
    if not hours:
        return {}
    closed = closed_until(ledger.redis, list(hours.values()))
    waiting = turns.waiting(ledger.redis, list(hours))
    return {batch: until for batch, until, rows in zip(hours, closed, waiting, strict=True) if until and rows}


def _report(batch: Batch, waits_until: float | None, folders: Folders) -> BatchReport:
    spec, counts = batch.spec, batch.counts
    elapsed = max((batch.finished_at or time.time()) - spec.created_at, 1e-3)
    rate = counts.done / elapsed
    left = None if counts.total is None else counts.total - counts.ended
    return BatchReport(
        batch=spec.batch,
        source=spec.source,
        model=spec.model,
        priority=spec.priority,
        window=spec.hours.window if spec.hours else None,
        state=batch.state,
        waits_until=waits_until,
        total=counts.total,
        submitted=counts.submitted,
        done=counts.done,
        failed=counts.failed,
        cancelled=counts.cancelled,
        created_at=spec.created_at,
        finished_at=batch.finished_at,
        cancelled_at=batch.cancelled_at,
        unread=batch.unread,
        elapsed_s=round(elapsed, 3),
        rate=round(rate, 3),
        eta_s=round(left / rate, 1) if left is not None and rate > 0 else None,
        files=[str(path) for path in published(batch, folders)],
    )


def dead_letters(
    ledger: Ledger, folders: Folders, batch: str | None, codes: Collection[ErrorCode] | None
) -> Iterator[tuple[str, ErrorRow]]:
    """Failed rows with the id of their batch, one at a time: of one batch, or of all, the newest batch first.

    Cancelled rows only where `codes` ask for them. Of all batches, one whose files were changed is passed over.
    """
    wanted = set(codes) if codes else set(ErrorCode) - {ErrorCode.CANCELLED}
    if batch is not None:
        yield from ((batch, row) for row in sealing.errors(batch, ledger, folders) if row.error.code in wanted)
        return
    for found in ledger.newest_first():
        if not (found.counts.failed or (found.counts.cancelled and ErrorCode.CANCELLED in wanted)):
            continue
        try:
            yield from dead_letters(ledger, folders, found.spec.batch, codes)
        except UsageError as error:
            logs.get(batch=found.spec.batch).warning("failed rows cannot be read", reason=str(error))


def published(batch: Batch, folders: Folders) -> list[Path]:
    """The batch's published files, its outputs first; none before it is done."""
    if batch.state is not BatchState.DONE:
        return []
    names = [f"{batch.spec.output}{end}" for end in (".jsonl", ".txt", ".errors.jsonl")]
    return [folders.outputs / name for name in names if (folders.outputs / name).exists()]


def outputs(batch: Batch, ledger: Ledger, folders: Folders) -> Iterator[bytes]:
    """The output rows as lines in input order: the published ones, or what is done so far."""
    if batch.state is not BatchState.DONE:
        yield from _outputs_so_far(batch, ledger, folders)
        return
    file = folders.outputs / f"{batch.spec.output}.jsonl"
    if not file.exists():
        raise UsageError(f"{file} is not there any more: it was moved or deleted after the batch was published")
    with file.open("rb") as stream:
        yield from stream


def _outputs_so_far(batch: Batch, ledger: Ledger, folders: Folders) -> Iterator[bytes]:
    """Rows marked done, from the segments. The batch may be published at any moment, which the segments outlive."""
    done = ledger.bitmap(batch.spec.batch, Mark.DONE)
    with Merge(folders.segments / batch.spec.batch, len(done) * 8, {Mark.DONE: done}) as merge:
        for index in set_bits(done):
            row = merge.line(index)
            if row is not None:
                yield without_index(row)


def _worker(info: queues.WorkerInfo) -> WorkerReport:
    age = None if info.last_heartbeat is None else round(max(0.0, time.time() - info.last_heartbeat), 1)
    return WorkerReport(name=info.name, state=info.state, queues=list(info.queues), heartbeat_age_s=age)
