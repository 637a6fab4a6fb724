"""`watch` and `submit`: files become batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from contract import audit, claimed, logs
from contract.errors import BadPrompt, DllmError, UsageError, nearest
from contract.flags import Model, RedisUrl, Root, among, choices, sampling_flags
from contract.hours import closed_until
from contract.jobs import PRIORITIES
from contract.ledger import BatchSpec, BatchState
from contract.sampling import parse_params
from contract.settings import ProducerSettings, read
from producer import display, kinds, report, sources, submitter
from producer.claims import Claims, Look, checked_name, columns
from producer.commands.following import Meter, wait_for
from producer.commands.options import Debug, Json
from producer.commands.rehearsing import rehearse
from producer.commands.session import INTERRUPTED, Session, Stop, errors
from producer.resuming import resume
from producer.sources import STDIN
from producer.watcher import Watcher


def watch(
    once: Annotated[bool, typer.Option("--once", help="Submit what is there now, and exit")] = False,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", help="Serve /metrics, /healthz and /readyz there")
    ] = None,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Watch batch_inputs/ and submit every .txt, .jsonl, .csv and .parquet file that is put there.

    Example: producer watch
    """
    with errors(debug), Stop() as stop:
        flags = {"root": root, "redis_url": redis_url, "metrics_port": metrics_port}
        session = Session.open(flags, quiet=False)
        watcher = Watcher(session.settings, session.ledger, stop)
        if once:
            watcher.run_once()
            return
        logs.get().info("watching", folder=str(session.folders.inputs))
        from producer.monitoring import monitor  # loads libraries that no other command needs

        with monitor(watcher, stop):
            watcher.run()
        logs.get().info("watching_stopped")


@sampling_flags()
def submit(
    words: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help=".txt, .jsonl, .csv, .parquet, .gz, folders, patterns; - reads stdin"),
    ],
    name: Annotated[str | None, typer.Option("--name", help="Name of the output files, if not that of FILE")] = None,
    priority: Annotated[
        str | None,
        typer.Option("--priority", help="high, normal or low", autocompletion=choices(ProducerSettings, "priority")),
    ] = None,
    model: Model = None,
    not_before: Annotated[
        str | None, typer.Option("--not-before", help="Run from then on: 22:00, 2026-12-03T22:00 or +2h30m")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Run at these hours of the day only, such as 22:00-06:00")
    ] = None,
    output_format: Annotated[
        str | None,
        typer.Option(
            "--output-format",
            help="jsonl, csv, parquet or openai, beside the JSON lines",
            autocompletion=choices(ProducerSettings, "output_format"),
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="A new batch, even if the same was submitted before")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the outputs are published")] = False,
    as_json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read all, submit nothing, say what is there")] = False,
    recursive: Annotated[
        bool | None, typer.Option("--recursive", help="Of a folder, take those below it too, outputs in the same ones")
    ] = None,
    input_format: Annotated[
        str,
        typer.Option(
            "--input-format",
            help="What stdin is: txt, jsonl, csv, parquet, txt.gz, jsonl.gz, csv.gz",
            autocompletion=among(end[1:] for end in kinds.ENDINGS),
        ),
    ] = "jsonl",
    prompt_column: Annotated[str | None, typer.Option(help="Column that holds the prompt, if not prompt")] = None,
    messages_column: Annotated[str | None, typer.Option(help="Column that holds the messages, if not messages")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column that holds the id, if not id or custom_id")] = None,
    csv_delimiter: Annotated[
        str | None, typer.Option(help="Between the values of a .csv, if not a comma; tab for a tab")
    ] = None,
    template: Annotated[Path | None, typer.Option(help="File with the prompt's text and its {column} fields")] = None,
    *,
    sampling: dict[str, Any],
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Submit files and print a batch id for each. The files stay as they are; later changes do not matter.

    What was submitted before, with the same parameters, goes on as the batch it is: only what has no output runs again.

    Example: producer submit questions.jsonl --wait --max-new-tokens 128
    """
    flags: dict[str, Any] = {"root": root, "redis_url": redis_url, "model": model, "priority": priority}
    flags |= {"not_before": not_before, "window": window, "output_format": output_format, "recursive": recursive}
    flags |= {"prompt_column": prompt_column, "messages_column": messages_column, "id_column": id_column}
    flags |= {"csv_delimiter": csv_delimiter, "template": template}
    with errors(debug), Stop() as stop:
        if name is not None:
            checked_name(name)
        if priority is not None and priority not in PRIORITIES:
            raise UsageError(f"--priority must be one of {', '.join(PRIORITIES)}{nearest(priority, PRIORITIES)}")
        settings = _settings(flags, sampling)
        files = _checked_inputs(words, settings.recursive, name)
        piped = sources.stdin_name(name, input_format)
        if dry_run:
            rehearse(files, piped, as_json, settings, stop)
            return
        session = Session.open(settings)
        asked = [Asked(file, below, piped, name, force) for file, below in files.items()]
        taken = [_submit_file(one, session, stop, as_json) for one in asked if not stop()]
        finish(taken, wait_, as_json, session, stop)


def _settings(flags: dict[str, Any], sampling: dict[str, Any]) -> ProducerSettings:
    """The settings, the command's sampling parameters laid over the configured ones. Raises UsageError."""
    settings = read(ProducerSettings, flags)
    try:
        params = parse_params(sampling, settings.params)
    except BadPrompt as error:
        raise UsageError(str(error)) from None
    columns(settings)  # a template that cannot be read is told before anything else is done
    return settings.model_copy(update={"params": params})


def _checked_inputs(words: list[Path], recursive: bool, name: str | None) -> dict[Path, Path]:
    """Refuse the whole command before anything is submitted, rather than half of it after."""
    files = sources.find(words, recursive)
    if name is not None and len(files) > 1:
        raise UsageError("--name goes with one FILE")
    return files


@dataclass(frozen=True)
class Asked:
    """A file to submit: the folder below `batch_outputs/` for its outputs, what it is called if it comes on standard
    input, their name if not its own, and whether it is to be a new batch in any case."""

    file: Path
    below: Path
    piped: str
    name: str | None
    force: bool


@dataclass(frozen=True)
class Submitted:
    """What became of a file: its batch, whether it was read to its end, whether it is a new batch, and how many rows of
    one that was there already run again."""

    spec: BatchSpec
    file: Path
    complete: bool
    new: bool = True
    queued_again: int = 0


def _submit_file(asked: Asked, session: Session, stop: Stop, quiet: bool) -> Submitted:
    spec, new = _claim(asked, session, stop)
    if not quiet:
        display.answer(spec.batch)
    again = 0 if new else _resume(spec, asked.file, session)
    return Submitted(spec, asked.file, submit_claimed(spec, session, stop), new, again)


def finish(taken: list[Submitted], wait_: bool, as_json: bool, session: Session, stop: Stop) -> None:
    """Wait where that was asked for, and answer."""
    session.tell_if_no_worker()
    failures = wait_for([one.spec for one in taken if one.complete], session, stop) if wait_ else 0
    if as_json:
        found = [report.find(one.spec.batch, session.ledger) for one in taken]
        stand = report.batch_reports(found, session.ledger, session.folders)
        told = [
            {
                "file": str(one.file),
                "batch": one.spec.batch,
                "new": one.new,
                "queued_again": one.queued_again,
                "status": status.model_dump(mode="json"),
            }
            for one, status in zip(taken, stand, strict=True)
        ]
        display.answer(json.dumps({"batches": told}, indent=2))
    if stop():
        raise typer.Exit(INTERRUPTED)
    if failures:
        raise typer.Exit(1)


def _resume(spec: BatchSpec, file: Path, session: Session) -> int:
    """The same was submitted before: run again what has no output, and say so; returns how many rows."""
    found = report.find(spec.batch, session.ledger)
    content = None if file == STDIN else file
    resumed = resume(found, content, session.settings.max_line_mb << 20, session.ledger, session.folders)
    audit.requeued(spec.batch, resumed.queued)
    counts = found.counts
    total = "?" if counts.total is None else counts.total
    what = "standard input" if file == STDIN else file
    told = f"{what} was submitted before as {spec.batch}: {counts.done} of {total} rows are done"
    queued = f", {resumed.queued} that had failed or were cancelled are queued again" if resumed.queued else ""
    left = f", {resumed.left} wait or run" if resumed.left else ""
    stuck = counts.failed + counts.cancelled - resumed.queued
    lost = f", {stuck} cannot run again (`producer failed {spec.batch}` says why)" if stuck > 0 else ""
    display.say(f"{told}{queued}{left}{lost}; --force makes a new batch")
    return resumed.queued


def submit_claimed(spec: BatchSpec, session: Session, stop: Stop) -> bool:
    """Submit a batch to its end; False when it was stopped before."""
    found = session.ledger.get(spec.batch)
    if found is not None and found.state is not BatchState.SUBMITTING:
        return True
    if spec.hours and (opens := closed_until(session.ledger.redis, [spec.hours])[0]):
        display.say(f"{spec.batch} waits until {display.moment(opens)}")
    packed = spec.packed or spec.kind == "parquet"  # the cursor counts what is in it
    size = None if packed else claimed.source(spec, session.folders).stat().st_size
    with display.reading_bar() as bar:
        meter = Meter(bar, spec.source, size, session)
        complete = submitter.submit(spec, session.ledger, session.settings, meter.show, stop)
    if not complete:
        display.say(f"stopped at row {session.ledger.cursor(spec.batch).index}: `producer watch` goes on from there")
    return complete


def _claim(asked: Asked, session: Session, stop: Stop) -> tuple[BatchSpec, bool]:
    """The batch of a file, and whether it is a new one."""
    claims, file = Claims(session.settings, session.ledger), asked.file
    if file == STDIN:
        return claims.spool(sources.stdin(stop), asked.piped, asked.name, asked.force)
    inbox, parent = session.folders.inputs.resolve(), file.parent.resolve()
    watched = parent == inbox or (session.settings.recursive and inbox in parent.parents)
    if file.is_symlink() or not watched:
        if asked.force:
            return claims.snapshot(file, asked.name, asked.below), True
        return claims.snapshot_once(file, asked.name, asked.below)
    # Left in the inbox it would be submitted a second time by whoever watches it.
    spec = claims.take(file, Look.at(file), asked.name, below=parent.relative_to(inbox))
    if spec is None:
        raise DllmError(f"{file} was taken by a running `producer watch`")
    return spec, True
