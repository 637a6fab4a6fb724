"""Looks for what crashes, foreign tools and lost memory left behind, and puts it right.

The leader among the workers does it all the time, `producer doctor` when asked. Looking changes nothing. Repairs are
steps that may be repeated and may meet each other: a job is put back only if at that very moment its row has not ended
and stands nowhere, and first marks win as everywhere.

    lost_rows          submitted rows that have not ended and stand in no list or registry: their jobs are put back,
                       or written anew from the claimed source; without it they end as `source_lost`
    unfinished_cancel  a cancelled batch with rows left: cancelled to its end
    unsealed           a complete batch that nobody publishes: published
    unreadable_record  a batch whose record is of a newer version, or no record: for a person
    missing_source     a batch whose source is still to be read, and is gone: only a person can put it back
    unrecorded_claim   a claimed source of which the ledger knows nothing: recorded, and a producer submits it
    unreadable_claim   a claimed folder that does not tell what it was claimed for: for a person
    orphan_segments    rows of a batch that nobody knows: put aside, into `batch_outputs/.orphans/`
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from contract import cancelling, claimed, paths, sealing, stores
from contract.jobs import ErrorCode, ErrorDetail, ErrorRow, PromptJob
from contract.ledger import Batch, BatchState, Cursor, Ledger, Mark
from contract.merging import clear_bits, union
from contract.parser import parse
from contract.paths import Folders
from contract.queues import job_ids, prompts, queue, restore, standing

Kind = Literal[
    "lost_rows",
    "unfinished_cancel",
    "unsealed",
    "unreadable_record",
    "missing_source",
    "unrecorded_claim",
    "unreadable_claim",
    "orphan_segments",
]
T = TypeVar("T")

CONFIRM_S = 3.0
"""A row must be found lost again after this long: it may be between two places in a call of RQ that is no one step."""
CLAIM_IDLE_S = 10.0
"""A younger claim may be on its way to the ledger."""
CANCEL_IDLE_S = 10.0
"""Whoever began to cancel a batch is given so long to do it alone."""
ORPHAN_IDLE_S = 3600.0
"""Segments that somebody wrote to a while ago may belong to somebody."""
AT_A_TIME = 10_000
"""Lost rows of one batch told at a time; the others are found the next time."""
CHUNK = 500
LONGEST_LINE = 1 << 28
"""Rows that were too long for the producer have ended as errors: a source is read again with any limit above its."""


@dataclass(frozen=True)
class Finding:
    """Something wrong: where (a batch's id or a folder), what, and what a repair does or a person must do."""

    kind: Kind
    where: str
    what: str
    remedy: str
    repairable: bool = True
    rows: tuple[int, ...] = ()


class Auditor:
    """One who looks again and again; remembers which rows seemed lost, to find them lost twice."""

    def __init__(self, ledger: Ledger, folders: Folders) -> None:
        self._ledger = ledger
        self._folders = folders
        self.unsure = False
        """Did rows seem lost at the last look that it did not tell of, because they had not for long enough?"""
        self._since: dict[tuple[str, int], float] = {}

    def look(self, thorough: bool = False) -> list[Finding]:
        """What is wrong now. Unless `thorough`, a queue whose number of jobs is right is not looked through."""
        records = self._ledger.records(self._ledger.open_batches())
        batches = [batch for batch in records.values() if batch is not None]
        return [
            *_unreadable(records),
            *self._cancelled(batches),
            *self._lost(batches, thorough),
            *self._complete(batches),
            *self._without_source(batches),
            *self._unrecorded(),
            *self._orphans(),
        ]

    def repair(self, finding: Finding) -> str:
        """Put it right; returns what was done. Raises OSError and UsageError where the files do not allow it."""
        repairs: dict[Kind, Callable[[Finding], str]] = {
            "lost_rows": self._restore,
            "unfinished_cancel": self._finish_cancel,
            "unsealed": self._seal,
            "unrecorded_claim": self._adopt,
            "orphan_segments": self._put_aside,
        }
        return repairs[finding.kind](finding)

    # Looking

    def _cancelled(self, batches: Sequence[Batch]) -> Iterator[Finding]:
        now = self._ledger.now()
        for batch in batches:
            if not batch.being_cancelled or now - (batch.cancelled_at or 0.0) < CANCEL_IDLE_S:
                continue
            left = batch.counts.submitted - batch.counts.ended
            yield Finding("unfinished_cancel", batch.spec.batch, f"cancelled, but {left} rows are left", "cancels them")

    def _lost(self, batches: Sequence[Batch], thorough: bool) -> Iterator[Finding]:
        now = time.monotonic()
        missing = self._missing([batch for batch in batches if not batch.being_cancelled], thorough)
        seen = {(batch, index): self._since.get((batch, index), now) for batch, rows in missing for index in rows}
        self._since = seen
        self.unsure = any(now - since < CONFIRM_S for since in seen.values())
        for batch, rows in missing:
            sure = tuple(index for index in rows if now - seen[batch, index] >= CONFIRM_S)
            if sure:
                what = f"{_some(sure)} stand in no queue and have not ended"
                yield Finding("lost_rows", batch, what, "queues them again", rows=sure)

    def _missing(self, batches: Sequence[Batch], thorough: bool) -> list[tuple[str, list[int]]]:
        """Rows that seem to stand nowhere, by batch."""
        by_queue = defaultdict(list)
        for batch in batches:
            if batch.counts.submitted > batch.counts.ended:
                by_queue[batch.spec.model, batch.spec.priority].append(batch)
        found: list[tuple[str, list[int]]] = []
        for (model, priority), group in by_queue.items():
            target = queue(self._ledger.redis, model, priority)
            outstanding = sum(batch.counts.submitted - batch.counts.ended for batch in group)
            names = [batch.spec.batch for batch in group]
            if thorough or standing(self._ledger.redis, target, names) < outstanding:
                found += self._nowhere(group, job_ids(self._ledger.redis, target, names))
        return found

    def _nowhere(self, batches: Sequence[Batch], ids: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """A bit for each row of `batches`, set for those that stand somewhere: an eighth of a byte a row."""
        stands = {batch.spec.batch: bytearray(batch.counts.submitted + 7 >> 3) for batch in batches}
        for job_id in ids:
            batch, _, number = job_id.rpartition("-")
            index = int(number) if number.isascii() and number.isdecimal() else -1
            if (bits := stands.get(batch)) is not None and 0 <= index < len(bits) * 8:
                bits[index >> 3] |= 0x80 >> (index & 7)
        for record in batches:
            batch = record.spec.batch
            accounted = union([bytes(stands[batch]), *self._ledger.bitmaps(batch).values()])
            if rows := list(itertools.islice(clear_bits(accounted, record.counts.submitted), AT_A_TIME)):
                yield batch, rows

    def _complete(self, batches: Sequence[Batch]) -> Iterator[Finding]:
        for batch in batches:
            if batch.counts.complete and not self._ledger.lock(batch.spec.batch, "seal").locked():
                yield Finding(
                    "unsealed", batch.spec.batch, "all rows have ended, but it is not published", "publishes it"
                )

    def _without_source(self, batches: Sequence[Batch]) -> Iterator[Finding]:
        for batch in batches:
            file = claimed.source(batch.spec, self._folders)
            if batch.state is BatchState.SUBMITTING and not file.exists():
                what = f"its file is not read to the end, and {file} is gone"
                yield Finding("missing_source", batch.spec.batch, what, "put it back, or `producer cancel`", False)

    def _unrecorded(self) -> Iterator[Finding]:
        folders = claimed.entries(self._folders)
        known = self._ledger.records([folder.name for folder in folders]).keys()
        for folder in folders:
            if folder.name in known or claimed.idle_s(folder) < CLAIM_IDLE_S:
                continue
            try:
                spec = claimed.read_manifest(folder)
            except FileNotFoundError:
                continue  # a claim that never got its source; the producer sweeps it
            except (OSError, ValidationError) as error:
                what = f"its {claimed.MANIFEST} cannot be read ({type(error).__name__})"
                yield Finding("unreadable_claim", str(folder), what, "move the source back to batch_inputs/", False)
                continue
            if spec.batch == folder.name and claimed.source(spec, self._folders).exists():
                yield Finding("unrecorded_claim", str(folder), "the ledger knows no such batch", "records it")

    def _orphans(self) -> Iterator[Finding]:
        folders = [entry for entry in sorted(self._folders.segments.iterdir()) if entry.is_dir()]
        known = self._ledger.records([folder.name for folder in folders]).keys()
        for folder in folders:
            at_home = folder.name in known or (self._folders.claimed / folder.name).exists()
            if not at_home and claimed.idle_s(folder) > ORPHAN_IDLE_S:
                aside = stores.of(self._folders).shown(".orphans")
                yield Finding(
                    "orphan_segments", str(folder), "rows of a batch that is not known", f"moves them to {aside}"
                )

    # Repairing

    def _restore(self, finding: Finding) -> str:
        record = self._ledger.get(finding.where)
        if record is None:
            return "nothing: the batch is not known any more"
        bare: list[int] = []
        kept = 0
        for chunk in _chunks(finding.rows):
            jobs = prompts(self._ledger.redis, finding.where, chunk)
            bare += [index for index, job in zip(chunk, jobs, strict=True) if job is None]
            kept += self._put_back(record, [index for index, job in zip(chunk, jobs, strict=True) if job is not None])
        read, failed = self._read_again(record, set(bare)) if bare else (0, 0)
        self._since = {row: since for row, since in self._since.items() if row[0] != finding.where}
        sealing.seal(finding.where, self._ledger, self._folders)
        return f"{kept} jobs put back, {read} read again from the source, {failed} ended as errors"

    def _put_back(self, record: Batch, rows: Sequence[int] = (), jobs: Sequence[PromptJob] = ()) -> int:
        spec, redis = record.spec, self._ledger.redis
        target = queue(redis, spec.model, spec.priority)
        return restore(redis, target, spec.batch, self._ledger.mark_keys(spec.batch), rows, jobs)

    def _read_again(self, record: Batch, wanted: set[int]) -> tuple[int, int]:
        """Queue the rows `wanted` from the source; those it does not give end as errors. How many of each."""
        queued = failed = 0
        with contextlib.closing(self._rows(record, wanted)) as rows:
            for chunk in _chunks(rows):
                jobs = [row for row in chunk if isinstance(row, PromptJob)]
                queued += self._put_back(record, jobs=jobs)
                failed += self._fail(record, [row for row in chunk if isinstance(row, ErrorRow)])
        return queued, failed

    def _rows(self, record: Batch, wanted: Collection[int]) -> Generator[PromptJob | ErrorRow, None, None]:
        """What the source says about each row `wanted`, or an error row that says that it is gone."""
        left = set(wanted)
        file = claimed.source(record.spec, self._folders)
        with contextlib.ExitStack() as stack:
            try:
                stream = stack.enter_context(paths.opened(file))
            except FileNotFoundError:
                stream = None
            if stream is not None:
                parsed = stack.enter_context(contextlib.closing(parse(stream, record.spec, Cursor(), LONGEST_LINE)))
                while left and (found := next(parsed, None)) is not None:
                    if found.row.index in left:
                        left.discard(found.row.index)
                        yield found.row
        detail = ErrorDetail(
            code=ErrorCode.SOURCE_LOST, message=f"Redis lost the prompt, and {record.spec.source} does not hold it now"
        )
        for index in sorted(left):
            yield ErrorRow(index=index, id=str(index), line=0, prompt=None, error=detail)

    def _fail(self, record: Batch, rows: Sequence[ErrorRow]) -> int:
        if not rows:
            return 0
        batch = record.spec.batch
        store = stores.of(self._folders, record.spec)
        with store.segment(batch, f"audit-{socket.gethostname()}-{os.getpid()}") as segment:
            segment.append(rows)
        with self._ledger.redis.pipeline(transaction=True) as pipe:
            for row in rows:
                self._ledger.mark(pipe, batch, row.index, Mark.FAILED)
            return sum(answer == 1 for answer in pipe.execute())

    def _finish_cancel(self, finding: Finding) -> str:
        return f"{cancelling.cancel(finding.where, self._ledger, self._folders).rows} rows cancelled"

    def _seal(self, finding: Finding) -> str:
        sealed = sealing.seal(finding.where, self._ledger, self._folders)
        return "published" if sealed else "nothing: somebody else publishes it"

    def _adopt(self, finding: Finding) -> str:
        folder = Path(finding.where)
        claimed.adopt(claimed.read_manifest(folder), self._ledger, self._folders)
        return "recorded: a running `producer watch` submits it"

    def _put_aside(self, finding: Finding) -> str:
        return f"moved to {stores.of(self._folders).put_aside(Path(finding.where).name)}"


def _some(rows: Sequence[int]) -> str:
    """`3 rows (0, 1, 2)`, the first of them."""
    named = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} ({named})"


def _unreadable(records: Mapping[str, Batch | None]) -> Iterator[Finding]:
    for batch, record in records.items():
        if record is None:
            what = "its record cannot be read: of a newer version, or not ours (the log says more)"
            yield Finding("unreadable_record", batch, what, "upgrade, or restore the server from its backup", False)


def _chunks(rows: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(rows)
    while chunk := list(itertools.islice(rest, CHUNK)):
        yield chunk
