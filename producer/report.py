"""How batches stand and what came of them: the data behind `status`, `results` and `failed`.

Reads the ledger, the queues and the output folders, changes nothing and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from contract import claimed, logs, queues, sealing, stores, turns
from contract.errors import UsageError, nearest
from contract.formats import published_ends
from contract.hours import closed_until
from contract.jobs import ErrorCode, ErrorRow, LaneName, Priority
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.merging import NOWHERE, Merge, clear_bits, set_bits, union, without_index
from contract.paths import Folders

KNOWN = 1_000
"""Batches among which the nearest to a mistyped id is sought."""


class BatchReport(BaseModel):
    """One batch, for people and scripts. Times in seconds.

    `elapsed_s` is the time since it was submitted, or until it was published; `rate` and `tokens_per_s` count done rows
    and their tokens since the first row was started; `waits_until` is set while rows wait for the batch's hours: when
    they may run next.
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
    output_tokens: int
    cached: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    cancelled_at: float | None
    unread: bool
    elapsed_s: float
    rate: float
    tokens_per_s: float
    eta_s: float | None
    files: list[str]


class QueueReport(BaseModel):
    """Prompts of one model and priority that wait in Redis; requests are more urgent than any batch."""

    model_config = ConfigDict(frozen=True)

    model: str
    priority: LaneName
    waiting: int


class WorkerReport(BaseModel):
    """A living worker; `heartbeat_age_s` is how long ago it gave a sign, the rest is how it stood then.

    `rows` are in its engine; `tokens_per_s` are those of answers, over the last minute. None where it does not tell.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    state: str
    queues: list[str]
    heartbeat_age_s: float | None
    model: str | None = None
    device: str | None = None
    rows: int | None = None
    tokens_per_s: float | None = None
    peak_memory_mb: int | None = None


class SystemReport(BaseModel):
    """Everything at a glance, the newest batch first."""

    model_config = ConfigDict(frozen=True)

    batches: list[BatchReport]
    queues: list[QueueReport]
    workers: list[WorkerReport]


def find(batch: str, ledger: Ledger) -> Batch:
    """The batch of that id. Raises UsageError naming the nearest known one."""
    records = ledger.records([batch])
    found = records.get(batch)
    if batch in records and found is None:
        raise UsageError(f"the record of batch '{batch}' cannot be read: the log in logs/ says why")
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
        batches=batch_reports(batches, ledger, folders), queues=waiting(ledger, models), workers=workers(ledger)
    )


def waiting(ledger: Ledger, models: Sequence[str]) -> list[QueueReport]:
    """The queues of `models`."""
    return [
        QueueReport(model=name, priority=priority, waiting=rows)
        for name in models
        for priority, rows in queues.depths(ledger.redis, name).items()
    ]


def workers(ledger: Ledger) -> list[WorkerReport]:
    """All living workers."""
    return [_worker(info) for info in queues.workers(ledger.redis)]


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
    now = time.time()
    elapsed = max((batch.finished_at or now) - spec.created_at, 1e-3)
    until = batch.ended_at if counts.complete and batch.ended_at else now
    running = max(until - (batch.started_at or spec.created_at), 1e-3)
    rate = counts.done / running
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
        output_tokens=batch.output_tokens,
        cached=batch.cached,
        created_at=spec.created_at,
        started_at=batch.started_at,
        finished_at=batch.finished_at,
        cancelled_at=batch.cancelled_at,
        unread=batch.unread,
        elapsed_s=round(elapsed, 3),
        rate=round(rate, 3),
        tokens_per_s=round(batch.output_tokens / running, 2),
        eta_s=round(left / rate, 1) if left is not None and rate > 0 else None,
        files=published(batch, folders),
    )


def dead_letters(
    ledger: Ledger,
    folders: Folders,
    batch: str | None,
    codes: Collection[ErrorCode] | None,
    since: float | None = None,
) -> Iterator[tuple[str, ErrorRow]]:
    """Failed rows with the id of their batch, one at a time: of one batch, or of all, the newest batch first.

    Cancelled rows only where `codes` ask for them; with `since`, in seconds since the epoch, those that failed then or
    later. Of all batches, one whose files were changed is passed over.
    """
    wanted = set(codes) if codes else set(ErrorCode) - {ErrorCode.CANCELLED}
    if batch is not None:
        for row in sealing.errors(batch, ledger, folders):
            if row.error.code in wanted and (since is None or (row.error.at or 0.0) >= since):
                yield batch, row
        return
    for found in ledger.newest_first():
        if not (found.counts.failed or (found.counts.cancelled and ErrorCode.CANCELLED in wanted)):
            continue
        try:
            yield from dead_letters(ledger, folders, found.spec.batch, codes, since)
        except UsageError as error:
            logs.get(batch=found.spec.batch).warning("dead_letters_hidden", reason=str(error))


def source(batch: Batch, folders: Folders) -> Path:
    """Where the batch's source lies. Raises UsageError when it is not there any more."""
    spec = batch.spec
    away = batch.processed or Path(spec.output).parent / spec.source
    places = [claimed.source(spec, folders), folders.processed / away]
    for file in places:
        if file.is_file():
            return file
    raise UsageError(f"{places[1]} is not there any more: put it back, or submit the file anew")


def published(batch: Batch, folders: Folders) -> list[str]:
    """Where the batch's published files are, its outputs first; none before it is done.

    In `batch_outputs/` those that are there still; an object store is not asked, since `status` asks for many batches.
    """
    if batch.state is not BatchState.DONE:
        return []
    spec, counts = batch.spec, batch.counts
    names = [f"{spec.output}{end}" for end in published_ends(spec, counts.failed + counts.cancelled > 0)]
    if spec.outputs_url is not None:
        return [f"{spec.outputs_url}/{name}" for name in names]
    return [str(folders.outputs / name) for name in names if (folders.outputs / name).exists()]


def missing(batch: Batch, marks: Mapping[Mark, bytes]) -> Iterator[tuple[int, int]]:
    """The rows that were submitted and have not ended, as ranges: the first and the last index of each."""
    first = last = NOWHERE
    for index in clear_bits(union(marks.values()), batch.counts.submitted):
        if last != NOWHERE and index > last + 1:
            yield first, last
        first = index if last == NOWHERE or index > last + 1 else first
        last = index
    if last != NOWHERE:
        yield first, last


def outputs(batch: Batch, done: bytes, folders: Folders) -> Iterator[bytes]:
    """The output rows as lines in input order: the published ones, or those of the rows marked in `done`."""
    if batch.state is not BatchState.DONE:
        return _outputs_so_far(batch, done, folders)
    store, name = stores.of(folders, batch.spec), f"{batch.spec.output}.jsonl"
    try:
        return _lines(store.open(name))
    except FileNotFoundError:
        gone = f"{store.shown(name)} is not there any more: it was moved or deleted after the batch was published"
        raise UsageError(gone) from None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        yield from stream


def _outputs_so_far(batch: Batch, done: bytes, folders: Folders) -> Iterator[bytes]:
    """Rows marked done, from the segments. The batch may be published at any moment, which the segments outlive."""
    name, store = batch.spec.batch, stores.of(folders, batch.spec)
    with store.workplace(name) as place, Merge(store.segments(name, place), len(done) * 8, {Mark.DONE: done}) as merge:
        for index in set_bits(done):
            row = merge.line(index)
            if row is not None:
                yield without_index(row)


def _worker(info: queues.WorkerInfo) -> WorkerReport:
    age = None if info.last_heartbeat is None else round(max(0.0, time.time() - info.last_heartbeat), 1)
    known = {name: value for name, value in info.vitals.items() if name in WorkerReport.model_fields}
    base = {"name": info.name, "state": info.state, "queues": list(info.queues), "heartbeat_age_s": age}
    try:
        return WorkerReport.model_validate({**known, **base})
    except ValidationError:  # what it told is nothing that a worker of ours tells
        return WorkerReport.model_validate(base)
