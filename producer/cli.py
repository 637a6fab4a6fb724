"""The `producer` command: options in, exit codes out. Everything it does is done by the modules beside it.

Exit codes: 0 all well, 1 something failed, 2 wrong usage, 130 interrupted while watching or submitting a file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import yaml
from redis.exceptions import RedisError
from rich.progress import Progress as Bar

from contract import audit, cancelling, claimed, formats, logs, paths, queues, sealing, server
from contract.errors import BadPrompt, DllmError, ServerError, UsageError, nearest
from contract.hours import closed_until
from contract.jobs import PRIORITIES, ErrorCode, ErrorRow
from contract.ledger import Batch, BatchSpec, BatchState, Cursor, Ledger, Mark
from contract.paths import Folders
from contract.sampling import SamplingParams, parse_params
from contract.settings import ProducerSettings, read
from producer import configuring, display, journals, preview, report, review, sources, story
from producer.claims import Claims, Look, checked_name, columns, planned
from producer.doctor import examine
from producer.resuming import resume
from producer.sources import STDIN
from producer.submitter import OUTAGES, Progress, pause_after, submit, wait
from producer.watcher import Watcher

POLL_S = 0.25
SEAL_AFTER_S = 2.0
"""A worker publishes a batch it completes at once; one that nobody published by then is published here."""
WATCH_S = 2.0
INTERRUPTED = 130
FAILED_SHOWN = 100
LOG = "producer-{}"
"""Hosts may share the folder, and a file of several hosts would not hold whole lines."""

app = typer.Typer(
    name="producer",
    help="Submit prompts for diffusion language models, and see what became of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Root = Annotated[Path | None, typer.Option("--root", help="Folder under which all others lie [DLLM_ROOT, else .]")]
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Redis address [DLLM_REDIS_URL, else a local server is started]")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else")]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="Batch id, as `submit` and `status` print it")]
MaybeBatch = Annotated[str | None, typer.Argument(metavar="[BATCH]", help="Batch id, as `status` prints it")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only the row with this id; may be repeated")]
Codes = Annotated[list[str] | None, typer.Option("--code", help="Only rows with this error code; may be repeated")]


def main() -> None:
    """Entry point of the installed command."""
    app()


@app.command()
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
    with _errors(debug), Stop() as stop:
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


@app.command("submit")
def submit_command(
    words: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help=".txt, .jsonl, .csv, .parquet, .gz, folders, patterns; - reads stdin"),
    ],
    name: Annotated[str | None, typer.Option("--name", help="Name of the output files [that of FILE]")] = None,
    priority: Annotated[str | None, typer.Option("--priority", help="high, normal or low")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name under models/, or path of a checkpoint")] = None,
    not_before: Annotated[
        str | None, typer.Option("--not-before", help="Run from then on: 22:00, 2026-12-03T22:00 or +2h30m")
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Run at these hours of the day only, such as 22:00-06:00")
    ] = None,
    output_format: Annotated[
        str | None, typer.Option("--output-format", help="jsonl, csv, parquet or openai, beside the JSON lines")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="A new batch, even if the same was submitted before")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the outputs are published")] = False,
    as_json: Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read all, submit nothing, say what is there")] = False,
    recursive: Annotated[
        bool | None, typer.Option("--recursive", help="Of a folder, take those below it too, outputs in the same ones")
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input-format", help="What stdin is: txt, jsonl, csv, parquet, txt.gz, jsonl.gz, csv.gz")
    ] = "jsonl",
    prompt_column: Annotated[str | None, typer.Option(help="Column that holds the prompt [prompt]")] = None,
    messages_column: Annotated[str | None, typer.Option(help="Column that holds the messages [messages]")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column that holds the id [id, custom_id]")] = None,
    csv_delimiter: Annotated[str | None, typer.Option(help="Between the values of a .csv; tab for a tab [,]")] = None,
    template: Annotated[Path | None, typer.Option(help="File with the prompt's text and its {column} fields")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest output")] = None,
    denoise_steps: Annotated[int | None, typer.Option(help="Denoise steps, for rule fixed_steps")] = None,
    rule: Annotated[str | None, typer.Option(help="Acceptance rule")] = None,
    threshold: Annotated[float | None, typer.Option(help="Confidence threshold")] = None,
    factor: Annotated[float | None, typer.Option(help="Factor, for rule factor")] = None,
    entropy_bound: Annotated[float | None, typer.Option(help="Entropy bound")] = None,
    entropy_threshold: Annotated[float | None, typer.Option(help="Entropy, for rule entropy_threshold")] = None,
    kl_threshold: Annotated[float | None, typer.Option(help="Bound of the KL, for rule klass")] = None,
    edit_threshold: Annotated[float | None, typer.Option(help="Confidence of edits, for rule joint_threshold")] = None,
    block_length: Annotated[int | None, typer.Option(help="Positions denoised as one block")] = None,
    cache: Annotated[str | None, typer.Option(help="none, prefix or dual, for bidirectional models")] = None,
    cache_refresh: Annotated[int | None, typer.Option(help="Blocks between computations of the whole canvas")] = None,
    commit: Annotated[str | None, typer.Option(help="separate or fused, for models with a causal context")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature, 0 for none")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely tokens, 0 for all")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds in which a started prompt must be answered")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; the same one gives the same text")] = None,
    truncate: Annotated[str | None, typer.Option(help="left or middle: where too long a prompt is cut")] = None,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Submit files and print a batch id for each. The files stay as they are; later changes do not matter.

    What was submitted before, with the same parameters, goes on as the batch it is: only what has no output runs again.

    Example: producer submit questions.jsonl --wait --max-new-tokens 128
    """
    sampling = {
        "max_new_tokens": max_new_tokens,
        "denoise_steps": denoise_steps,
        "rule": rule,
        "threshold": threshold,
        "factor": factor,
        "entropy_bound": entropy_bound,
        "entropy_threshold": entropy_threshold,
        "kl_threshold": kl_threshold,
        "edit_threshold": edit_threshold,
        "block_length": block_length,
        "cache": cache,
        "cache_refresh": cache_refresh,
        "commit": commit,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "truncate": truncate,
        "timeout_s": timeout_s,
    }
    flags: dict[str, Any] = {"root": root, "redis_url": redis_url, "model": model, "priority": priority}
    flags |= {"not_before": not_before, "window": window, "output_format": output_format, "recursive": recursive}
    flags |= {"prompt_column": prompt_column, "messages_column": messages_column, "id_column": id_column}
    flags |= {"csv_delimiter": csv_delimiter, "template": template}
    with _errors(debug), Stop() as stop:
        if name is not None:
            checked_name(name)
        if priority is not None and priority not in PRIORITIES:
            raise UsageError(f"--priority must be one of {', '.join(PRIORITIES)}{nearest(priority, PRIORITIES)}")
        settings = _settings(flags, sampling)
        files = _checked_inputs(words, settings.recursive, name)
        piped = sources.stdin_name(name, input_format)
        if dry_run:
            _rehearse(files, piped, as_json, settings, stop)
            return
        session = Session.open(settings)
        asked = [Asked(file, below, piped, name, force) for file, below in files.items()]
        taken = [_submit_file(one, session, stop, as_json) for one in asked if not stop()]
        _finish_submitting(taken, wait_, as_json, session, stop)


@app.command()
def rerun(
    batch: BatchId,
    param: Annotated[
        list[str] | None, typer.Option("--param", metavar="NAME=VALUE", help="A sampling parameter; may be repeated")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the output files [that of BATCH]")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name under models/, or path of a checkpoint")] = None,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait until the outputs are published")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Run a batch's source again as a new batch, with other parameters or another model; the old one stays.

    Example: producer rerun questions-1a2b3c4d --param temperature=0.7 --param seed=2
    """
    with _errors(debug), Stop() as stop:
        if name is not None:
            checked_name(name)
        session = Session.open({"root": root, "redis_url": redis_url, "model": model})
        found = report.find(batch, session.ledger)
        session.settings = session.settings.model_copy(update={"model": model or found.spec.model})
        changes = {"params": _changed(found.spec.params, param or []), "model": session.settings.queue_model}
        file = report.source(found, session.folders)
        claims = Claims(session.settings, session.ledger)
        spec = claims.again(file, found.spec.model_copy(update=changes), name)
        if not as_json:
            display.answer(spec.batch)
        complete = _submit_claimed(spec, session, stop)
        _finish_submitting([Submitted(spec, file, complete)], wait_, as_json, session, stop)


def _changed(params: SamplingParams, given: list[str]) -> SamplingParams:
    values = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--param takes NAME=VALUE, such as --param temperature=0.7, not '{word}'")
        values[name] = yaml.safe_load(value) if value else ""
    try:
        return parse_params(values, params)
    except BadPrompt as error:
        raise UsageError(f"--param: {error}") from None


@app.command()
def init(
    force: Annotated[bool, typer.Option("--force", help="Write over the files that are there")] = False,
    as_json: Json = False,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Make the folders, and write configuration files in which every setting is explained.

    Example: producer init --root /srv/batches
    """
    with _errors(debug):
        folders = read(ProducerSettings, {"root": root}).folders.create()
        written = configuring.write(folders, force)
        if as_json:
            display.answer(json.dumps({"written": [str(file) for file, new in written.items() if new]}, indent=2))
            return
        for file, new in written.items():
            display.answer(f"{_near(file)}  {'written' if new else 'is there already: --force writes over it'}")


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(metavar="[BATCH]", help="One batch in detail")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every two seconds, until Ctrl-C")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Show how batches, queues and workers stand.

    Example: producer status --watch
    """
    with _errors(debug), Stop() as stop:
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


@app.command()
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
    with _errors(debug):
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
            display.say(f"published: {_near(file)}")
        if output_file is not None:
            display.say(f"{count} rows written to {output_file}")


@app.command()
def failed(
    batch: MaybeBatch = None,
    code: Codes = None,
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
    with _errors(debug):
        codes = _codes(code)
        session = Session.open({"root": root, "redis_url": redis_url})
        if batch is not None:
            report.find(batch, session.ledger)
        most = limit or (FAILED_SHOWN if batch is None else None)
        found = report.dead_letters(session.ledger, session.folders, batch, codes)
        rows = itertools.islice(found, most)
        if as_json:
            _answer_failures(batch, rows)
        elif display.failures(rows) == 0:
            display.answer("no failed rows")
        if most is not None and next(found, None) is not None:
            display.say(f"there are more: these are the first {most}, --limit sets how many")


@app.command()
def retry(
    batch: MaybeBatch = None,
    all_: Annotated[bool, typer.Option("--all", help="Failed rows of all batches")] = False,
    code: Codes = None,
    id_: Ids = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Queue failed rows again, of a batch or of all. Rows that could not be read from the file stay failed.

    Example: producer retry questions-1a2b3c4d --code out_of_memory
    """
    with _errors(debug):
        if (batch is None) != all_:
            raise UsageError("give BATCH or --all, and not both")
        if all_ and id_:
            raise UsageError("--id goes with BATCH: ids are a batch's own")
        codes = _codes(code)
        session = Session.open({"root": root, "redis_url": redis_url})
        chosen = [report.find(batch, session.ledger).spec.batch] if batch else _with_failures(session)
        queued, refused = {}, []
        for one in chosen:
            try:
                queued[one] = sealing.retry(one, codes, session.ledger, session.folders, session.ledger.redis, id_)
                audit.requeued(one, queued[one])
            except UsageError as error:
                if batch:
                    raise
                refused.append(one)
                display.say(f"{one}: {error}")
        count = sum(queued.values())
        if as_json:
            batches = [{"batch": one, "queued": rows} for one, rows in queued.items() if rows or batch]
            display.answer(json.dumps({"queued": count, "batches": batches, "refused": refused}, indent=2))
        else:
            display.answer(f"{_rows(count)} queued again")
        if refused:
            raise typer.Exit(1)


@app.command("cancel")
def cancel_command(
    batch: BatchId,
    id_: Ids = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """End a batch's rows that wait or run, or only those with --id; what is done is published.

    Example: producer cancel questions-1a2b3c4d
    """
    with _errors(debug):
        session = Session.open({"root": root, "redis_url": redis_url})
        before = report.find(batch, session.ledger)
        if id_:
            ended = cancelling.cancel_rows(batch, id_, session.ledger, session.folders)
        else:
            ended = cancelling.cancel(batch, session.ledger, session.folders)
        audit.cancelled(batch, ended.rows)
        after = report.batch_reports([report.find(batch, session.ledger)], session.ledger, session.folders)[0]
        if as_json:
            document = {"batch": batch, "cancelled": ended.rows, "unknown": ended.unknown}
            display.answer(json.dumps({**document, "status": after.model_dump(mode="json")}, indent=2))
        else:
            display.answer(_told(before, after, ended))
        for one in ended.unknown:
            display.say(f"no row with the id '{one}' waits or runs: it ended, or was not read yet, or never was")
        if ended.unknown:
            raise typer.Exit(1)


@app.command("logs")
def logs_command(
    subject: Annotated[str, typer.Argument(metavar="BATCH[:INDEX]", help="A batch, or one of its rows by its index")],
    since: Annotated[str | None, typer.Option("--since", help="Not before: 24h, 90m, 7d or 2026-12-02T22:00")] = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Tell the story of a batch or of one prompt, from the logs of all processes, and how it stands now.

    Example: producer logs questions-1a2b3c4d:17
    """
    with _errors(debug):
        told = story.Subject.of(subject)
        settings = read(ProducerSettings, {"root": root, "redis_url": redis_url})
        standing = _how_it_stands(told, settings)
        start = journals.since(since) if since else None
        found = story.events(told, settings.folders.logs, start)
        count = display.story(told, found, standing, as_json)
        if standing is None and not count:
            raise UsageError(f"neither Redis nor the logs know '{subject}': `producer status` lists the batches")


def _how_it_stands(told: story.Subject, settings: ProducerSettings) -> dict[str, Any] | None:
    """None where Redis is away, or knows no such batch: then the logs are asked alone."""
    try:
        ledger = Ledger(server.open_redis(settings))
        batch = ledger.get(told.batch)
        return story.standing(told, batch, ledger, settings.folders) if batch else None
    except (ServerError, RedisError) as error:
        display.say(f"how it stands is not known: {error}")
        return None


@app.command("report")
def report_command(
    since: Annotated[str, typer.Option("--since", help="24h, 90m, 7d or a moment such as 2026-12-02T22:00")] = "24h",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it over time: a .png, .svg or .pdf file")] = None,
    as_json: Json = False,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Sum up throughput and failures of the last hours from the logs: over time, by model, by worker, by code.

    Example: producer report --since 24h --plot yesterday.png
    """
    with _errors(debug):
        settings = read(ProducerSettings, {"root": root})
        found = review.review(settings.folders.logs, journals.since(since))
        if plot is not None:
            review.plot(found, plot)
        if as_json:
            display.answer(found.model_dump_json(indent=2))
            return
        display.review(found)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Repair what can be repaired")] = False,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Say, a line each, what is wrong with queues, folders, server and machine; exits 1 if anything is left so.

    Example: producer doctor --fix
    """
    with _errors(debug):
        settings = read(ProducerSettings, {"root": root, "redis_url": redis_url})
        with contextlib.suppress(OSError):  # a folder that cannot be written is a finding
            logs.set_up(settings, LOG.format(logs.host()), quiet=True)
        found = []
        for one in examine(settings, fix):
            found.append(one)
            if not as_json:
                display.diagnosis(one)
        healthy = all(one.done is not None or one.note for one in found)
        if as_json:
            findings = [one.model_dump(mode="json") for one in found]
            display.answer(json.dumps({"healthy": healthy, "findings": findings}, indent=2))
        elif all(one.note for one in found):
            display.answer("all is well")
        if not healthy:
            raise typer.Exit(1)


@app.command("stop-server")
def stop_server(as_json: Json = False, root: Root = None, redis_url: RedisUrl = None, debug: Debug = False) -> None:
    """End the local Redis server of this root; it is started again when it is needed.

    Example: producer stop-server
    """
    with _errors(debug):
        stopped = server.stop(read(ProducerSettings, {"root": root, "redis_url": redis_url}))
        if as_json:
            display.answer(json.dumps({"stopped": stopped}))
        else:
            display.answer("server stopped" if stopped else "no server was running")


class Stop:
    """True once SIGINT or SIGTERM came. The second signal does what it would do without us."""

    def __init__(self) -> None:
        self._stopped = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._stopped

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class Session:
    """What every command needs: settings, folders that exist, logs, and a ledger with a server behind it."""

    settings: ProducerSettings
    ledger: Ledger
    _told: bool = False

    @staticmethod
    def open(given: dict[str, Any] | ProducerSettings, quiet: bool = True) -> Session:
        """From settings, or from flags for them. Raises DllmError when one is wrong or Redis is not to be had."""
        settings = read(ProducerSettings, given) if isinstance(given, dict) else given
        formats.require(settings.output_format)
        settings.folders.create()
        logs.set_up(settings, LOG.format(logs.host()), quiet)
        return Session(settings, Ledger(server.open_redis(settings)))

    @property
    def folders(self) -> Folders:
        return self.settings.folders

    def tell_if_no_worker(self) -> None:
        """Say once what is missing when nobody is there to take the prompts."""
        model = self.settings.queue_model
        if self._told or any(worker.serves(model) for worker in queues.workers(self.ledger.redis)):
            return
        self._told = True
        default = self.settings.model == ProducerSettings.model_fields["model"].default
        command = "worker run" if default else f"worker run --model {self.settings.model}"
        display.say(f"no worker for model '{model}' is alive: start one with `{command}`")


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


def _rehearse(files: Iterable[Path], piped: str, as_json: bool, settings: ProducerSettings, stop: Stop) -> None:
    """Tell what each file would come to. Exits 1 if any row could not run."""
    formats.require(settings.output_format)
    found = []
    for file in files:
        with _spooled(piped, stop) if file == STDIN else contextlib.nullcontext(file) as readable:
            spec = planned(readable, settings, columns(settings), source=piped if file == STDIN else None)
            found.append(preview.preview(readable, spec, settings, stop))
        if not as_json:
            display.preview(found[-1])
    if stop():
        raise typer.Exit(INTERRUPTED)
    last = preview.last_throughput(settings.folders.logs, settings.queue_model)
    if as_json:
        display.answer(json.dumps(preview.document(found, last), indent=2))
    else:
        display.estimate(found, last, settings.queue_model)
    if any(one.errors for one in found):
        raise typer.Exit(1)


@contextlib.contextmanager
def _spooled(piped: str, stop: Stop) -> Iterator[Path]:
    """Standard input as a file that is gone afterwards."""
    with tempfile.NamedTemporaryFile(suffix=piped[piped.index(".") :]) as spool:
        spool.writelines(sources.stdin(stop))
        spool.flush()
        yield Path(spool.name)


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
    return Submitted(spec, asked.file, _submit_claimed(spec, session, stop), new, again)


def _finish_submitting(taken: list[Submitted], wait_: bool, as_json: bool, session: Session, stop: Stop) -> None:
    """Wait where that was asked for, and answer."""
    session.tell_if_no_worker()
    failures = _wait_for([one.spec for one in taken if one.complete], session, stop) if wait_ else 0
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


def _submit_claimed(spec: BatchSpec, session: Session, stop: Stop) -> bool:
    """Submit a batch to its end; False when it was stopped before."""
    found = session.ledger.get(spec.batch)
    if found is not None and found.state is not BatchState.SUBMITTING:
        return True
    if spec.hours and (opens := closed_until(session.ledger.redis, [spec.hours])[0]):
        display.say(f"{spec.batch} waits until {display.moment(opens)}")
    packed = spec.packed or spec.kind == "parquet"  # the cursor counts what is in it
    size = None if packed else claimed.source(spec, session.folders).stat().st_size
    with display.reading_bar() as bar:
        meter = _Meter(bar, spec.source, size, session)
        complete = submit(spec, session.ledger, session.settings, meter.show, stop)
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


class _Meter:
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


def _wait_for(specs: list[BatchSpec], session: Session, stop: Stop) -> int:
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
    files = ", ".join(_near(file) for file in report.published(batch, session.folders))
    cancelled = f", {batch.counts.cancelled} cancelled" if batch.counts.cancelled else ""
    told = report.batch_reports([batch], session.ledger, session.folders)[0]
    speed = f", {told.tokens_per_s:.1f} tokens/s in {display.duration(told.elapsed_s)}"
    display.say(f"{spec.batch}: {batch.counts.done} done, {batch.counts.failed} failed{cancelled}{speed}: {files}")
    if batch.counts.failed:
        display.say(f"`producer failed {spec.batch}` says why")


def _answer_results(
    found: Batch, marks: dict[Mark, bytes], rows: Iterator[bytes], output_file: Path | None, session: Session
) -> None:
    """One JSON document, written as its rows come; without them where they go to a file."""
    counts, files = found.counts, [str(file) for file in report.published(found, session.folders)]
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


def _with_failures(session: Session) -> list[str]:
    return [batch.spec.batch for batch in session.ledger.newest_first() if batch.counts.failed]


def _told(before: Batch, after: report.BatchReport, ended: cancelling.Cancelled) -> str:
    if before.state is BatchState.DONE:
        how = "cancelled" if before.cancelled_at is not None else "published"
        return f"nothing to cancel: the batch was {how} already"
    counts = f"{after.done} done, {after.failed} failed, {after.cancelled} cancelled"
    unread = ", and no more of the file is read" if after.unread and before.cancelled_at is None else ""
    return f"{_rows(ended.rows)} cancelled{unread}; the batch stands at {counts}"


def _rows(count: int) -> str:
    return f"{count} {'row' if count == 1 else 'rows'}"


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
    return display.safe(row.decode("utf-8", "replace").rstrip("\n")).encode() + b"\n"


def _codes(given: list[str] | None) -> set[ErrorCode] | None:
    for code in given or ():
        if code not in set(ErrorCode):
            raise UsageError(f"no error code '{code}'{nearest(code, list(ErrorCode))}: one of {', '.join(ErrorCode)}")
    return {ErrorCode(code) for code in given} if given else None


def _near(file: Path) -> str:
    """`file` as a person in this folder would write it."""
    with contextlib.suppress(ValueError):
        return str(file.relative_to(Path.cwd()))
    return str(file)


@contextlib.contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """Turn our errors into one line on stderr and an exit code; anything else is a bug and shows its traceback."""
    try:
        yield
    except BrokenPipeError:
        # The reader had enough. Python would complain once more when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (DllmError, RedisError, OSError) as error:
        if debug:
            raise
        display.say(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
