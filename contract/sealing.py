"""The end of a prompt's life: a batch whose rows have all ended is published, and its source put away.

Whoever notices a complete batch seals it, worker or producer, under the ledger's lease `seal`. Every step can be
repeated, so a crash anywhere is finished by the next one who looks:

    merge    the segments in index order, as the ledger says: a row marked done gives its first output, a row marked
             failed or cancelled its last error; memory is eight bytes a row, and the lines are copied from disk to disk
    publish  `{output}.errors.jsonl`, `{output}.txt`, other forms that were asked for (`contract.formats`) and
             `{output}.summary.json`, then `{output}.jsonl`: who sees the last sees the others (`contract.stores`)
    move     the source from `batch_inputs/.claimed/{batch}/` to `batch_processed/`
    close    the batch in the ledger; a while later its segments are removed

Published rows are the segments' rows without their internal first field, `index`. It can be had back, because the
n-th published row is the n-th row so marked in the ledger; `retry` relies on that when it puts a published batch's
rows back as a segment, so that old and new rows are published together.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from redis.exceptions import LockError
from redis.lock import Lock

from contract import audit, formats, logs, paths, segments, stores
from contract.claimed import MANIFEST
from contract.errors import DllmError, UsageError
from contract.jobs import ErrorCode, ErrorDetail, ErrorRow, PromptJob
from contract.ledger import LOCK_S, Batch, BatchSpec, BatchState, Ledger, Mark
from contract.merging import Merge, is_set, set_bits, union, without_index
from contract.names import Connection
from contract.paths import Folders
from contract.queues import enqueuing, failed_jobs, queue, requeuing
from contract.ranges import written
from contract.stores import Store
from contract.summary import Summary

PUT_BACK = "00-published-{}.jsonl"
"""Sorts before all others; its own each time, so that a late removal of older ones cannot mean it."""
WAIT_S = 10.0
SYNCED_S = 10.0
"""By then Redis has what it was told on its disk."""
REOPEN_CHUNK = 1_000


def seal_ready(ledger: Ledger, folders: Folders, keep_s: float = 0.0) -> list[str]:
    """Seal every complete batch, and clear segments away `keep_s` after that; returns the batches sealed.

    One batch that cannot be sealed (a full disk, say) is logged and does not hold up the others.
    """
    sealed = []
    for batch in sorted(batch for batch, _, complete in ledger.glance() if complete):
        try:
            if seal(batch, ledger, folders):
                sealed.append(batch)
        except (OSError, DllmError, ValueError) as error:
            logs.get(batch=batch).error("publishing_failed", reason=str(error))
    _clear_leftovers(ledger, folders, max(keep_s, SYNCED_S))
    return sealed


def seal(batch: str, ledger: Ledger, folders: Folders) -> bool:
    """Publish a complete batch; True when this call did it.

    False when the batch is not complete, is published already, or is being sealed by someone else.
    """
    if not _sealable(ledger.get(batch)):  # most calls end here, without a lease that might keep out a later one
        return False
    with _lease(ledger, batch) as lease:
        record = ledger.get(batch) if lease else None
        if lease is None or record is None or not _sealable(record):
            return False
        try:
            _publish(record, ledger, folders, lease)
            processed = _put_source_away(record.spec, folders)
            lease.hold()
            audit.published(record, ledger.now())
            ledger.close(batch, processed)
        except _LeaseLost:
            logs.get(batch=batch).warning("sealing_taken_over")
            return False
    counts = record.counts
    logs.get(batch=batch).info(
        "batch_published",
        output=record.spec.output,
        done=counts.done,
        failed=counts.failed,
        cancelled=counts.cancelled,
    )
    return True


def _sealable(record: Batch | None) -> bool:
    return record is not None and record.state is not BatchState.DONE and record.counts.complete


def errors(batch: str, ledger: Ledger, folders: Folders) -> Iterator[ErrorRow]:
    """The failed and cancelled rows of a batch in index order, published or not; none for an unknown batch."""
    record = ledger.get(batch)
    if record is None:
        return
    store = stores.of(folders, record.spec)
    bitmaps = ledger.bitmaps(batch)
    without = _without_output(bitmaps)
    if record.state is BatchState.DONE:
        for index, text in _published(_errors_file(record), without, store):
            yield ErrorRow.model_validate({"index": index, **json.loads(text)})
        return
    del bitmaps[Mark.DONE]
    with store.workplace(batch) as place, Merge(store.segments(batch, place), len(without) * 8, bitmaps) as merge:
        for index in set_bits(without):
            row = merge.line(index)
            yield ErrorRow.model_validate_json(row) if row else _unrecorded(index, merge.kind(index))


def rows(record: Batch, ledger: Ledger, folders: Folders) -> Iterator[tuple[int, bytes]]:
    """All rows of a published batch in index order, with and without output: index and line of each.

    Raises UsageError where its files were changed or moved away.
    """
    bitmaps = ledger.bitmaps(record.spec.batch)
    store = stores.of(folders, record.spec)
    outputs = _published(_outputs_file(record), bitmaps[Mark.DONE], store)
    return heapq.merge(outputs, _published(_errors_file(record), _without_output(bitmaps), store))


def retry(
    batch: str,
    codes: Collection[ErrorCode] | None,
    ledger: Ledger,
    folders: Folders,
    redis: Connection,
    ids: Collection[str] | None = None,
) -> int:
    """Queue the batch's failed rows again (only those with one of `codes` and of `ids`, where given); returns how many.

    Rows that could not be read from the source have no job and stay failed, as do rows whose job is gone.
    Raises UsageError for an unknown batch or one that is being cancelled, for one of `ids` that no such row has, or for
    a batch whose published files were changed or moved away.
    """
    with _ours(batch, ledger) as (record, lease):
        if record.being_cancelled:  # to reopen it would make the rest of the cancelling be forgotten
            raise UsageError(f"batch '{batch}' is being cancelled: try again when it has been published")
        target = queue(redis, record.spec.model, record.spec.priority)
        indices = failed_jobs(redis, target, batch, _chosen(errors(batch, ledger, folders), codes, ids))
        if not indices:
            return 0
        if record.state is BatchState.DONE:
            _put_back(record, ledger, folders, lease)
        for start in range(0, len(indices), REOPEN_CHUNK):
            chunk = indices[start : start + REOPEN_CHUNK]
            lease.hold()
            ledger.reopen(batch, chunk, requeuing(redis, target, [f"{batch}-{index}" for index in chunk]))
            _tell_requeued(batch, chunk)
    return len(indices)


def reinstate(batch: str, jobs: Iterable[PromptJob], ledger: Ledger, folders: Folders) -> int:
    """Queue those of `jobs`, rows of the batch as its source gives them, again that were cancelled; returns how many.

    Raises UsageError as `retry` does.
    """
    count = 0
    with _ours(batch, ledger) as (record, lease):
        target = queue(ledger.redis, record.spec.model, record.spec.priority)
        cancelled = ledger.bitmap(batch, Mark.CANCELLED)
        wanted = (job for job in jobs if is_set(cancelled, job.index))
        while chunk := list(itertools.islice(wanted, REOPEN_CHUNK)):
            if not count and record.state is BatchState.DONE:
                _put_back(record, ledger, folders, lease)
            lease.hold()
            ledger.reopen(batch, [job.index for job in chunk], enqueuing(target, chunk), Mark.CANCELLED)
            _tell_requeued(batch, [job.index for job in chunk])
            count += len(chunk)
    return count


def _tell_requeued(batch: str, indices: Sequence[int]) -> None:
    logs.get(batch=batch).info("rows_requeued", indices={batch: written(indices)}, rows=len(indices))


@contextlib.contextmanager
def _ours(batch: str, ledger: Ledger) -> Iterator[tuple[Batch, _Lease]]:
    """The batch, and the right to reopen it."""
    if ledger.get(batch) is None:
        raise UsageError(f"no batch '{batch}': `producer status` lists them all")
    with _lease(ledger, batch, wait_s=WAIT_S) as lease:
        if lease is None:
            raise UsageError(f"batch '{batch}' is being published at this moment: try again")
        record = ledger.get(batch)
        assert record is not None
        yield record, lease


def _chosen(rows: Iterable[ErrorRow], codes: Collection[ErrorCode] | None, ids: Collection[str] | None) -> list[int]:
    found, missing = [], set(ids or ())
    for row in rows:
        if (codes is None or row.error.code in codes) and (ids is None or row.id in ids):
            found.append(row.index)
            missing.discard(row.id)
    if missing:
        raise UsageError(f"no failed row to choose has the id '{min(missing)}': `producer failed` lists them")
    return found


# Merging


def _publish(record: Batch, ledger: Ledger, folders: Folders, lease: _Lease) -> None:
    spec = record.spec
    store = stores.of(folders, spec)
    (folders.segments / spec.batch).mkdir(parents=True, exist_ok=True)
    with store.workplace(spec.batch) as folder:
        files = _merge(record, ledger, store, folder, lease)
        for end, part in files:
            lease.hold()
            if part is not None:
                store.publish(part, f"{spec.output}{end}", lease.keep)
            else:
                store.delete(f"{spec.output}{end}")  # of an earlier seal, before its rows were retried


def _merge(
    record: Batch, ledger: Ledger, store: stores.Store, folder: Path, lease: _Lease
) -> list[tuple[str, Path | None]]:
    """Write what is to be published to parts in `folder`; the end of each file's name, None for one not to be there."""
    spec, total = record.spec, record.counts.total or 0
    summary = Summary()
    found = store.segments(spec.batch, folder, lease.keep)
    with contextlib.ExitStack() as stack:
        merge = stack.enter_context(Merge(found, total, ledger.bitmaps(spec.batch), lease.keep))
        lease.hold()  # who took over from us may have removed the segments, and nothing was lost
        _admit_losses(merge, record, ledger, store)
        parts = [folder / f".{name}.{uuid4().hex}.part" for name in ("outputs", "errors", "text", "summary")]
        outputs, failures, text, told = (stack.enter_context(part.open("wb")) for part in parts)
        form = stack.enter_context(formats.opened(spec, folder, record.started_at or spec.created_at))
        for index in range(total):
            lease.keep()
            row = merge.line(index)
            ok = row is not None and merge.kind(index) is Mark.DONE
            row = row or segments.line(_unrecorded(index, merge.kind(index)))
            (outputs if ok else failures).write(without_index(row))
            fields = json.loads(row)
            summary.add(fields)
            form.add(index, fields)
            if spec.kind == "txt":
                text.write(_readable(fields, whole_file=spec.txt_mode == "file"))
        any_failed = failures.tell() > 0
        told.write(json.dumps(summary.document(record, ledger.now()), indent=2).encode() + b"\n")
    return [
        (".errors.jsonl", parts[1] if any_failed else None),
        *([(".txt", parts[2])] if spec.kind == "txt" else []),
        *form.files(),
        (".summary.json", parts[3]),
        (".jsonl", parts[0]),
    ]


def _admit_losses(merge: Merge, record: Batch, ledger: Ledger, store: stores.Store) -> None:
    """A row that ended but is on no disk any more gets an error row; the ledger is told, so that it agrees.

    Raises DllmError where a published file has more: the server was restored from an older state.
    """
    batch = record.spec.batch
    lost_outputs, lost_errors = merge.missing(Mark.DONE), merge.missing(Mark.FAILED)
    _refuse_to_publish_less(store, _outputs_file(record), record.counts.done - len(lost_outputs))
    if lost_outputs:
        logs.get(batch=batch).error("outputs_lost", rows=len(lost_outputs), first=lost_outputs[0])
        ledger.lose(batch, lost_outputs)
    if lost_errors:
        logs.get(batch=batch).error("error_rows_lost", rows=len(lost_errors), first=lost_errors[0])


def _refuse_to_publish_less(store: stores.Store, name: str, outputs: int) -> None:
    """Raises DllmError where the file to be published is there already and has more than `outputs` rows."""
    try:
        published = store.open(name)
    except FileNotFoundError:
        return
    with published:
        there = sum(piece.count(b"\n") for piece in iter(lambda: published.read(1 << 20), b""))
    if there > outputs:
        what = f"{store.shown(name)} was published already with {there} rows, of which {outputs} are known now"
        raise DllmError(f"{what}: it stays as it is; move it away to have those published")


def _without_output(bitmaps: dict[Mark, bytes]) -> bytes:
    return union([bitmaps[Mark.FAILED], bitmaps[Mark.CANCELLED]])


def _unrecorded(index: int, kind: Mark) -> ErrorRow:
    """The row to publish for one that ended and is in no segment."""
    detail = ErrorDetail(code=ErrorCode.WORKER_CRASHED, message="the row ended, but its record was lost from the disk")
    if kind is Mark.CANCELLED:
        detail = ErrorDetail(code=ErrorCode.CANCELLED, message="cancelled")
    return ErrorRow(index=index, id=str(index), line=0, prompt=None, error=detail)


def _readable(row: dict[str, Any], whole_file: bool) -> bytes:
    """The row for people: its prompt quoted line by line, then the output or what went wrong."""
    error = row.get("error")
    answer = f"! {error['code']}: {error['message']}" if error else row["output"]
    prompt = row["prompt"] if isinstance(row.get("prompt"), str) else f"(row {row['id']})"
    quoted = "" if whole_file else "".join(f"> {part}\n" for part in prompt.split("\n"))
    text = f"{quoted}{answer}\n" + ("" if whole_file else "\n")
    return text.encode("utf-8", errors="backslashreplace")


# Steps after publishing


def _put_source_away(spec: BatchSpec, folders: Folders) -> str | None:
    """Move the source and what lies beside it; returns the source's path there, None when that was done before."""
    claimed, place = folders.claimed / spec.batch, None
    if not claimed.is_dir():
        return place
    processed = paths.make(folders.processed / Path(spec.output).parent)
    for file in sorted(claimed.iterdir()):
        if file.name == MANIFEST:
            continue
        moved = paths.move(file, processed)
        if file.name == spec.source:
            place = str(moved.relative_to(folders.processed))
    (claimed / MANIFEST).unlink(missing_ok=True)
    claimed.rmdir()
    paths.fsync_folder(claimed.parent)
    return place


def _clear_leftovers(ledger: Ledger, folders: Folders, keep_s: float) -> None:
    """Remove segments of batches that were published a while ago.

    Not at once: a Redis that syncs its file every second may forget, with the power, that a batch was closed and its
    last rows marked. It is then published again, and needs its segments. So does one that was published after the
    backup was made from which the server is restored.
    """
    if not folders.segments.is_dir():
        return
    names = sorted(path.name for path in folders.segments.iterdir())
    for record in ledger.get_many(names) if names else []:
        if record.state is not BatchState.DONE or time.time() - (record.finished_at or 0.0) < keep_s:
            continue
        try:
            _clear(record.spec.batch, ledger, folders)
        except (OSError, DllmError) as error:
            logs.get(batch=record.spec.batch).warning("segments_not_removed", reason=str(error))


def _clear(batch: str, ledger: Ledger, folders: Folders) -> None:
    with _lease(ledger, batch) as lease, contextlib.suppress(_LeaseLost):
        current = ledger.get(batch) if lease else None
        if lease and current and current.state is BatchState.DONE:
            lease.hold()
            stores.of(folders, current.spec).clear(batch, lease.hold)


# Published files, read back


def _put_back(record: Batch, ledger: Ledger, folders: Folders, lease: _Lease) -> None:
    """Make a published batch's rows a segment again. It is older than what comes now, so new errors replace its own."""
    batch, store = record.spec.batch, stores.of(folders, record.spec)
    lease.hold()
    store.clear(batch, lease.hold)
    (folders.segments / batch).mkdir(parents=True, exist_ok=True)
    bitmaps = ledger.bitmaps(batch)
    with store.workplace(batch) as folder:
        part = folder / f".put-back.{uuid4().hex}.part"
        with part.open("wb") as segment:
            rows = {_outputs_file(record): bitmaps[Mark.DONE], _errors_file(record): _without_output(bitmaps)}
            for name, bits in rows.items():
                for index, text in _published(name, bits, store):
                    lease.keep()
                    segment.write(b'{"index":%d,%s' % (index, text.lstrip()[1:]))
        store.publish(part, f".segments/{batch}/{PUT_BACK.format(uuid4().hex)}", lease.keep)
    paths.fsync_folder(folders.segments)


def _published(name: str, bits: bytes, store: Store) -> Iterator[tuple[int, bytes]]:
    """Each published row with its index: the n-th row is the n-th one marked in `bits`."""
    indices = set_bits(bits)
    changed = UsageError(
        f"{store.shown(name)} is not as it was published: put the original back, or submit the rows as a new batch"
    )
    with contextlib.ExitStack() as stack:
        for text in _opened(name, store, stack):
            index = next(indices, None)
            if index is None or not text.endswith(b"}\n"):
                raise changed
            yield index, text
    if next(indices, None) is not None:
        raise changed


def _opened(name: str, store: Store, stack: contextlib.ExitStack) -> Iterable[bytes]:
    try:
        return stack.enter_context(store.open(name))
    except FileNotFoundError:
        return ()


def _outputs_file(record: Batch) -> str:
    return f"{record.spec.output}.jsonl"


def _errors_file(record: Batch) -> str:
    return f"{record.spec.output}.errors.jsonl"


# The lease


class _LeaseLost(Exception):
    """Somebody else may be sealing this batch by now: stop at once, touch nothing more."""


class _Lease:
    """The right to seal one batch, renewed while the work goes on."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._renewed = time.monotonic()

    def keep(self) -> None:
        """Call often: renews the lease when it is due."""
        if time.monotonic() - self._renewed > LOCK_S / 4:
            self.hold()

    def hold(self) -> None:
        """Call before a step that must not happen twice at once: renews now, or raises _LeaseLost."""
        try:
            self._lock.reacquire()
        except LockError:
            raise _LeaseLost from None
        self._renewed = time.monotonic()


@contextlib.contextmanager
def _lease(ledger: Ledger, batch: str, wait_s: float = 0.0) -> Iterator[_Lease | None]:
    """The batch's seal lease, or None when someone else has it for longer than `wait_s`."""
    lock = ledger.lock(batch, "seal")
    if not lock.acquire(blocking=wait_s > 0, blocking_timeout=wait_s or None):
        yield None
        return
    try:
        yield _Lease(lock)
    finally:
        with contextlib.suppress(LockError):  # lost meanwhile: then it is not ours to release
            lock.release()
