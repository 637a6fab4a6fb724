"""Failed rows, a page at a time, however many there are: from bitmaps and jobs in Redis, never from whole files.

Rows that could not be read from their source have no job: of them only the index is known here.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract import queues
from contract.jobs import LANES, REMEDIES, ErrorCode, Message, PromptJob
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.merging import set_bits
from contract.paths import Folders

PAGE = 50
SCANNED = 1_000
"""The newest failed rows among which causes are counted and sought."""
EXCERPT = 300
LONGEST = 20_000
UNREADABLE = "unreadable"
"""For a row without a job: which code it has, its error row tells."""


@dataclass(frozen=True)
class Failing:
    """A failed row. `id` is None where there is no prompt of it: then it cannot be queued again."""

    batch: str
    index: int
    code: str
    message: str
    id: str | None = None
    prompt: str = ""

    @property
    def remedy(self) -> str:
        return REMEDIES[ErrorCode(self.code)] if self.code in set(ErrorCode) else "its error row says more"


@dataclass(frozen=True)
class Found:
    """A page of failed rows; `after` is what the next page begins after, None on the last one."""

    rows: Sequence[Failing]
    after: int | None


@dataclass(frozen=True)
class Newest:
    """The newest failed rows of all batches: how many by cause among the `scanned` newest of `total`."""

    rows: Sequence[Failing]
    causes: Sequence[tuple[str, int]]
    scanned: int
    total: int


def of_batch(batch: Batch, after: int, ledger: Ledger) -> Found:
    """Failed rows of a batch with an index greater than `after`, in its order."""
    bits = ledger.bitmap(batch.spec.batch, Mark.FAILED)
    first = max(0, after + 1)
    indices = []
    for index in set_bits(bits[first >> 3 :]):
        if (index := index + (first & ~7)) >= first:
            indices.append(index)
        if len(indices) > PAGE:
            break
    shown = indices[:PAGE]
    rows = _with_prompts(_rows(batch.spec.batch, shown, ledger), ledger)
    return Found(rows, shown[-1] if len(indices) > PAGE else None)


def newest(models: Sequence[str], code: str | None, ledger: Ledger) -> Newest:
    """Of all batches; only those with `code` where that is given."""
    redis = ledger.redis
    targets = [queues.queue(redis, model, lane) for model in models for lane in LANES]
    ids, total = queues.newest_failed(redis, targets, SCANNED)
    known = queues.failures(redis, ids)
    rows = [_failing(job_id, known[job_id]) for job_id in ids if job_id in known]
    causes = Counter(one.code for one in rows).most_common()
    wanted = [one for one in rows if code is None or one.code == code]
    return Newest(_with_prompts(wanted[:PAGE], ledger), causes, len(ids), total)


def causes(batch: Batch, ledger: Ledger, folders: Folders) -> tuple[list[tuple[str, int]], int | None]:
    """How many rows failed by cause, and among how many that was counted; None: among all.

    A published batch has all of it in its summary; of one that runs, the first rows that failed are looked at.
    """
    if batch.state is BatchState.DONE and (told := _summed_up(batch, folders)):
        return told, None
    indices = list(itertools.islice(set_bits(ledger.bitmap(batch.spec.batch, Mark.FAILED)), SCANNED))
    counted = Counter(one.code for one in _rows(batch.spec.batch, indices, ledger))
    return counted.most_common(), len(indices) if len(indices) == SCANNED else None


def of_row(batch: str, index: int, ledger: Ledger) -> Failing | None:
    """A failed row; None where there is no job of it."""
    (row,) = _with_prompts(_rows(batch, [index], ledger), ledger)
    return row if row.id is not None else None


def whole(job: PromptJob) -> str:
    """All of a prompt as text, up to what a page can show."""
    asked = job.asked
    if isinstance(asked, str):
        return asked[:LONGEST]
    turns = [f"{one.role}: {one.content}" if isinstance(one, Message) else str(one) for one in asked]
    return "\n".join(turns)[:LONGEST]


def excerpt(job: PromptJob) -> str:
    """The beginning of a prompt; of a conversation its last turn."""
    asked = job.asked
    if isinstance(asked, str):
        return asked[:EXCERPT]
    turn = asked[-1] if asked else ""
    text = f"{turn.role}: {turn.content}" if isinstance(turn, Message) else f"{len(asked)} token ids"
    return text[:EXCERPT]


def _summed_up(batch: Batch, folders: Folders) -> list[tuple[str, int]]:
    try:
        text = (folders.outputs / f"{batch.spec.output}.summary.json").read_text(encoding="utf-8")
        told = json.loads(text)["errors"]
        return sorted(((str(code), int(rows)) for code, rows in told.items()), key=lambda one: -one[1])
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []


def _rows(batch: str, indices: Sequence[int], ledger: Ledger) -> list[Failing]:
    """Without their prompts."""
    ids = [f"{batch}-{index}" for index in indices]
    known = queues.failures(ledger.redis, ids)
    lost = "there is no job for it: it could not be read from its source, or was lost"
    return [
        _failing(job_id, known[job_id]) if job_id in known else Failing(batch, index, UNREADABLE, lost)
        for job_id, index in zip(ids, indices, strict=True)
    ]


def _failing(job_id: str, why: str) -> Failing:
    batch, _, index = job_id.rpartition("-")
    code, _, message = why.partition(": ")
    number = int(index) if index.isascii() and index.isdecimal() else 0
    return Failing(batch, number, code or UNREADABLE, message)


def _with_prompts(rows: Sequence[Failing], ledger: Ledger) -> list[Failing]:
    jobs: dict[tuple[str, int], PromptJob] = {}
    for batch in {row.batch for row in rows}:
        found = queues.prompts(ledger.redis, batch, [row.index for row in rows if row.batch == batch])
        jobs |= {(batch, job.index): job for job in found if job}
    return [
        replace(row, id=job.id, prompt=excerpt(job)) if (job := jobs.get((row.batch, row.index))) else row
        for row in rows
    ]
