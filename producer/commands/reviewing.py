"""`status`, `results` and `failed`: how batches stand and what came of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from contract import paths
from contract.errors import UsageError
from contract.flags import RedisUrl, Root
from contract.jobs import ErrorRow
from contract.ledger import Batch, BatchState, Mark
from contract.terminal import safe
from producer import display, journals, report
from producer.commands import completing
from producer.commands.options import BatchId, Codes, Debug, Json, MaybeBatch, error_codes
from producer.commands.session import Session, Stop, errors
from producer.submitter import OUTAGES, wait

WATCH_S = 2.0
FAILED_SHOWN = 100


def status(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="[BATCH]", help="One batch in detail", autocompletion=completing.batches),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every two seconds, until Ctrl-C")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Show how batches, queues and workers stand.

    Example: producer status --watch
    """
    with errors(debug), Stop() as stop:
        if watch and as_json:
            raise UsageError("--watch does not go with --json: run `producer status --json` again and again instead")
        session = Session.open({"root": root, "redis_url": redis_url})
        shown = _standing(batch, session)
        if as_json:
            display.answer(shown.model_dump_json(indent=2))
            return
        display.standing(shown)
        while watch and not stop() and not _over(shown):
            wait(WATCH_S, stop)
            with contextlib.suppress(*OUTAGES):  # the last picture stays
                shown = _standing(batch, session)
                display.clear()
                display.standing(shown)


def _over(shown: report.SystemReport | report.BatchReport) -> bool:
    return isinstance(shown, report.BatchReport) and shown.state is BatchState.DONE


def _standing(batch: str | None, session: Session) -> report.SystemReport | report.BatchReport:
    if batch is None:
        return report.system(session.ledger, session.folders, session.settings.queue_model)
    return report.batch_reports([report.find(batch, session.ledger)], session.ledger, session.folders)[0]


def results(
    batch: BatchId,
    output_file: Annotated[
        Path | None, typer.Option("--output-file", help="Write the rows here instead of to stdout")
    ] = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Print a batch's output rows in input order, also while it still runs, and say on stderr what is missing.

    Example: producer results questions-1a2b3c4d --output-file so-far.jsonl
    """
    with errors(debug):
        session = Session.open({"root": root, "redis_url": redis_url})
        found = report.find(batch, session.ledger)
        marks = session.ledger.bitmaps(batch)
        rows = report.outputs(found, marks[Mark.DONE], session.folders)
        if as_json:
            _answer_results(found, marks, rows, output_file, session)
            return
        count = _write_rows(rows, output_file)
        if found.state is not BatchState.DONE:
            total = "an unknown number of" if found.counts.total is None else found.counts.total
            display.say(f"{count} rows so far, of {total}")
            display.missing(found, report.missing(found, marks))
        for file in report.published(found, session.folders):
            display.say(f"published: {display.near(file)}")
        if output_file is not None:
            display.say(f"{count} rows written to {output_file}")


def failed(
    batch: MaybeBatch = None,
    code: Codes = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Only what failed since then: 24h, 90m, 7d or 2026-12-02T22:00")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most so many rows [100 of all batches; all of one]")
    ] = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """List failed rows, of a batch or of all (the newest first), why they failed, and what to do about it.

    Example: producer failed --code model_error --limit 20
    """
    with errors(debug):
        codes = error_codes(code)
        session = Session.open({"root": root, "redis_url": redis_url})
        if batch is not None:
            report.find(batch, session.ledger)
        most = limit or (FAILED_SHOWN if batch is None else None)
        start = journals.since(since) if since else None
        found = report.dead_letters(session.ledger, session.folders, batch, codes, start)
        rows = itertools.islice(found, most)
        if as_json:
            _answer_failures(batch, rows)
        elif display.failures(rows) == 0:
            display.answer("no failed rows")
        if most is not None and next(found, None) is not None:
            display.say(f"there are more: these are the first {most}, --limit sets how many")


def _answer_results(
    found: Batch, marks: dict[Mark, bytes], rows: Iterator[bytes], output_file: Path | None, session: Session
) -> None:
    """One JSON document, written as its rows come; without them where they go to a file."""
    counts, files = found.counts, report.published(found, session.folders)
    head = {"batch": found.spec.batch, "state": found.state, "files": files, **counts.model_dump()}
    left = counts.submitted - sum(byte.bit_count() for bits in marks.values() for byte in bits)
    display.answer(json.dumps(head)[:-1] + f', "missing": {{"rows": {left}, "ranges": [')
    for number, ends in enumerate(report.missing(found, marks)):
        display.answer((", " if number else "") + json.dumps(ends))
    display.answer("]}")
    if output_file is not None:
        _write_rows(rows, output_file)
    else:
        display.answer(', "rows": [')
        for number, row in enumerate(rows):
            display.answer((", " if number else "") + row.decode("utf-8", "replace").rstrip("\n"))
        display.answer("]")
    display.answer("}")


def _answer_failures(batch: str | None, rows: Iterator[tuple[str, ErrorRow]]) -> None:
    """One JSON document, written as its rows come."""
    display.answer("{" + (f'"batch": {json.dumps(batch)}, ' if batch else "") + '"errors": [')
    for number, (of, row) in enumerate(rows):
        shown = row.model_dump(mode="json") if batch else {"batch": of, **row.model_dump(mode="json")}
        display.answer((", " if number else "") + json.dumps(shown))
    display.answer("]}")


def _write_rows(rows: Iterator[bytes], output: Path | None) -> int:
    if output is None:
        return sum(bool(sys.stdout.buffer.write(_obeyed_by_nobody(row))) for row in rows)
    partial = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as stream:
            count = sum(bool(stream.write(row)) for row in rows)
        paths.publish(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _obeyed_by_nobody(row: bytes) -> bytes:
    """JSON escapes most control characters, but not all that a terminal obeys."""
    if not sys.stdout.isatty():
        return row
    return safe(row.decode("utf-8", "replace").rstrip("\n")).encode() + b"\n"
