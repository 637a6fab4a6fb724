"""`export` and `delete`: what becomes of a batch that is over."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer

from contract import deleting
from contract.errors import UsageError, nearest
from contract.flags import RedisUrl, Root
from contract.jobs import OutputFormat
from contract.ledger import Batch
from contract.terminal import safe
from producer import display, report
from producer.commands.options import BatchId, Debug, Json
from producer.commands.session import Session, errors
from producer.exporting import export as write

FORMS: tuple[OutputFormat, ...] = get_args(OutputFormat)


def export(
    batch: BatchId,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMS)}")],
    output_file: Annotated[Path, typer.Option("--output-file", help="Write the rows here")],
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Write a published batch in another form: a row for each of the input, in its order, failed ones too.

    Example: producer export questions-1a2b3c4d --format csv --output-file answers.csv
    """
    with errors(debug):
        session = Session.open({"root": root, "redis_url": redis_url})
        found = report.find(batch, session.ledger)
        count, files = write(found, _form(form), output_file, session.ledger, session.folders)
        if as_json:
            told = {"batch": batch, "format": form, "rows": count, "files": [str(file) for file in files]}
            display.answer(json.dumps(told, indent=2))
            return
        for file in files:
            display.answer(str(file))
        display.say(f"{_counted(count, 'row')} written")


def delete(
    batch: BatchId,
    with_files: Annotated[
        bool, typer.Option("--files", help="Its published files and its source in batch_processed/ too")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Delete a batch that is over: its record, and the jobs that were kept for a retry; with --files its files too.

    Example: producer delete questions-1a2b3c4d --files
    """
    with errors(debug):
        session = Session.open({"root": root, "redis_url": redis_url})
        found = deleting.deletable(report.find(batch, session.ledger), batch)
        if not yes:
            _ask(found, deleting.files(found, session.folders) if with_files else [])
        gone = deleting.delete(batch, session.ledger, session.folders, with_files)
        if as_json:
            told = {"batch": batch, "jobs": gone.jobs, "files": gone.files}
            display.answer(json.dumps(told, indent=2))
            return
        files = f", {_counted(len(gone.files), 'file')}" if with_files else ""
        display.answer(f"{batch} deleted: its record, {_counted(gone.jobs, 'failed job')}{files}")


def _ask(batch: Batch, files: list[str]) -> None:
    """Raises UsageError where nobody can answer."""
    if not sys.stdin.isatty():
        raise UsageError("--yes is needed where nobody can be asked")
    counts = batch.counts
    for file in files:
        display.say(f"  {display.near(file)}")
    what = f"{batch.spec.batch} ({batch.spec.source}, {counts.done} done, {counts.failed} failed)"
    kept = f" and {_counted(len(files), 'file')}" if files else "; its files stay"
    typer.confirm(safe(f"delete {what}{kept}?"), abort=True, err=True)


def _form(given: str) -> OutputFormat:
    for form in FORMS:
        if given == form:
            return form
    raise UsageError(f"--format must be one of {', '.join(FORMS)}{nearest(given, FORMS)}")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
