"""What a person sees while a file is read and while its batch runs."""

from __future__ import annotations

import time

from rich.progress import Progress as Bar

from contract import sealing
from contract.ledger import BatchSpec, BatchState, Cursor
from producer import display, report
from producer.commands.session import Session, Stop
from producer.submitter import OUTAGES, Progress, pause_after, wait

POLL_S = 0.25
SEAL_AFTER_S = 2.0
"""A worker publishes a batch it completes at once; one that nobody published by then is published here."""


class Meter:
    """Draws how far a file has been read."""

    def __init__(self, bar: Bar, name: str, size: int | None, session: Session) -> None:
        self._bar = bar
        self._session = session
        self._name = display.short(name, 32)
        self._start = time.monotonic()
        self._task = bar.add_task(self._name, total=size and max(1, size), rows="")

    def show(self, cursor: Cursor, progress: Progress) -> None:
        rate = cursor.index / max(1e-3, time.monotonic() - self._start)
        waits = progress is Progress.FULL
        if waits:
            self._session.tell_if_no_worker()
        self._bar.update(
            self._task,
            completed=cursor.offset,
            description=f"{self._name}: waiting for workers to make room" if waits else self._name,
            rows=f"{cursor.index:,} rows" if waits else f"{cursor.index:,} rows, {rate:,.0f} rows/s",
        )


def wait_for(specs: list[BatchSpec], session: Session, stop: Stop) -> int:
    """Follow batches until they are published; returns how many rows have no output."""
    failures = 0
    with display.waiting_bar() as bar:
        for spec in specs:
            failures += _follow(spec, session, stop, bar)
    for spec in specs:
        if stop():
            look = f"`producer status {spec.batch} --watch` shows how it stands"
            display.say(f"{spec.batch} goes on without you: {look}, `producer results {spec.batch}` what is done")
        else:
            _summary(spec, session)
    return failures


def _follow(spec: BatchSpec, session: Session, stop: Stop, bar: Bar) -> int:
    """Wait until the batch is published or `stop`; returns how many rows have no output."""
    task = bar.add_task(display.short(spec.source, 32), total=None, told="")
    complete_since: float | None = None
    outages = 0
    while not stop():
        try:
            batch = report.find(spec.batch, session.ledger)
            counts = batch.counts
            told = display.progress(report.batch_reports([batch], session.ledger, session.folders)[0])
            bar.update(task, completed=counts.ended, total=counts.total, told=told)
            if batch.state is BatchState.DONE:
                return counts.failed + counts.cancelled
            complete_since = (complete_since or time.monotonic()) if counts.complete else None
            if complete_since and time.monotonic() - complete_since > SEAL_AFTER_S:
                sealing.seal(spec.batch, session.ledger, session.folders)
            outages = 0
            wait(POLL_S, stop)
        except OUTAGES as error:
            outages += 1
            wait(pause_after(outages, error), stop)
    return 0


def _summary(spec: BatchSpec, session: Session) -> None:
    batch = report.find(spec.batch, session.ledger)
    files = ", ".join(display.near(file) for file in report.published(batch, session.folders))
    cancelled = f", {batch.counts.cancelled} cancelled" if batch.counts.cancelled else ""
    told = report.batch_reports([batch], session.ledger, session.folders)[0]
    speed = f", {told.tokens_per_s:.1f} tokens/s in {display.duration(told.elapsed_s)}"
    display.say(f"{spec.batch}: {batch.counts.done} done, {batch.counts.failed} failed{cancelled}{speed}: {files}")
    if batch.counts.failed:
        display.say(f"`producer failed {spec.batch}` says why")
