"""What a person sees: tables, progress bars and text made safe for a terminal. Data comes from `producer.report`.

Rich on a terminal, plain aligned text where the output is piped. Progress goes to stderr: stdout belongs to results.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from contract.jobs import REMEDIES, ErrorCode, ErrorRow
from contract.ledger import Batch
from contract.terminal import safe, safe_lines
from producer.doctor import Diagnosis
from producer.journals import moment_of
from producer.preview import Preview, Throughput
from producer.report import BatchReport, SystemReport, WorkerReport
from producer.review import Review, Stretch
from producer.story import Subject

LONGEST_CELL = 60
PAGE = 1_000
"""Rows of a table that may be long; what is longer is several tables."""
RANGES_SHOWN = 10
SOON_S = 20 * 3600.0
"""A clock time this near is told without its date."""


def short(text: str, length: int = LONGEST_CELL) -> str:
    """`text` made safe and cut to `length`."""
    cut = safe(text[: length + 1])
    return cut if len(cut) <= length else f"{cut[: length - 1]}…"


def say(text: str) -> None:
    """A line for the person, on stderr."""
    print(safe(text), file=sys.stderr, flush=True)  # noqa: T201


def answer(text: str) -> None:
    """A line of the result, or several, on stdout; a terminal obeys nothing in it. Scripts get it as it is."""
    if sys.stdout.isatty():
        text = safe_lines(text)
    print(text, flush=True)  # noqa: T201


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout, whatever stands in its cells."""
    cells = [[safe(str(cell)) for cell in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        answer(_aligned([list(headers), *cells]))
        return
    drawn = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """`1h 05m`, `3m 20s`, `4.2s`; `-` when unknown."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes = round(seconds / 60)
    return f"{minutes // 60}h {minutes % 60:02}m" if minutes >= 60 else f"{seconds // 60:.0f}m {seconds % 60:02.0f}s"


def moment(at: float) -> str:
    """A moment of the next hours as `22:00`, any other as `2026-12-03 22:00`; local time."""
    return time.strftime("%H:%M" if abs(at - time.time()) < SOON_S else "%Y-%m-%d %H:%M", time.localtime(at))


def story(subject: Subject, found: Iterable[dict[str, Any]], standing: dict[str, Any] | None, as_json: bool) -> int:
    """What the logs hold, and how it stands; returns how many events there were."""
    count = 0
    if as_json:
        head = {"batch": subject.batch, "index": subject.index, "standing": standing}
        answer(json.dumps(head)[:-1] + ', "events": [')
        for count, event in enumerate(found, start=1):
            answer((", " if count > 1 else "") + json.dumps(event))
        answer("]}")
        return count
    for event in found:
        answer(safe(_told(subject, event)))
        count += 1
    if not count:
        say("the logs hold nothing of it: it was not begun, or they are older than what is kept")
    if standing is not None:
        answer(safe("stands: " + ", ".join(f"{name} {value}" for name, value in _flat(standing) if value is not None)))
    return count


KNOWN = {"timestamp", "level", "event", "host", "pid", "worker", "batch", "index", "indices"}


def _told(subject: Subject, event: dict[str, Any]) -> str:
    """A line of a story: when, who, what happened, and what is known of it."""
    at = moment_of(event)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03}"
    who = event.get("worker") or f"{event.get('host')}/{event.get('pid')}"
    known = [f"{name}={value}" for name, value in event.items() if name not in KNOWN and value not in ("", None)]
    if subject.index is None:
        rows = (event.get("indices") or {}).get(subject.batch, event.get("index"))
        known = [] if rows is None else [f"rows {rows}", *known]
    return "  ".join([when, str(who), str(event["event"]).replace("_", " "), " ".join(known)]).rstrip()


def review(found: Review) -> None:
    """Throughput over time, by model and by worker, and what failed. Stretches in which nothing happened are left
    out."""
    over_time = [one for one in found.bins if one.rows or one.output_tokens or one.failed or one.retried]
    if not over_time:
        answer(f"the logs hold no work since {moment(found.since)}")
        return
    table(
        (f"FROM (EACH {duration(found.bin_s)})", *STRETCH),
        [(moment(float(one.name)), *_stretch(one)) for one in [*over_time]],
    )
    for head, stretches in (("MODEL", found.models), ("WORKER", found.workers[:WORKERS_SHOWN])):
        answer("")
        table(
            (head, *STRETCH, "BUSY", "PEAK MB"),
            [
                (short(one.name, 32), *_stretch(one), duration(one.busy_s), one.peak_memory_mb or "-")
                for one in (*stretches, *([found.total] if head == "WORKER" and len(stretches) > 1 else ()))
            ],
        )
    if len(found.workers) > WORKERS_SHOWN:
        answer(f"and {len(found.workers) - WORKERS_SHOWN} workers more")
    for head, codes in (("FAILED", found.failures), ("TRIED AGAIN", found.retries)):
        if codes:
            answer("")
            table((head, "PROMPTS"), [(safe(code), count) for code, count in codes.items()])


WORKERS_SHOWN = 20
STRETCH = ("TOKENS/S", "TOKENS", "ROWS", "IN FLIGHT", "WAIT", "TOKENS/FORWARD", "FAILED", "RETRIED")


def _stretch(one: Stretch) -> tuple[object, ...]:
    per_forward = "-" if one.tokens_per_forward is None else f"{one.tokens_per_forward:.2f}"
    speed = (f"{one.tokens_per_s:.1f}", one.output_tokens, one.rows, f"{one.rows_in_flight:.1f}")
    return (*speed, duration(one.queue_wait_s), per_forward, one.failed, one.retried)


def _flat(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, value


def clear() -> None:
    """An empty screen, or an empty line where the output is no terminal."""
    print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", flush=True)  # noqa: T201


def standing(report: SystemReport | BatchReport) -> None:
    """Everything, or one batch."""
    if isinstance(report, SystemReport):
        system(report)
    else:
        batch(report)


def progress(report: BatchReport) -> str:
    """What stands beside the bar of a batch that runs."""
    cancelled = f", {report.cancelled} cancelled" if report.cancelled else ""
    left = f", {duration(report.eta_s)} left" if report.eta_s is not None else ""
    return f"{report.done} done, {report.failed} failed{cancelled}, {report.tokens_per_s:.1f} tokens/s{left}"


def system(report: SystemReport) -> None:
    """Batches, queues and workers at a glance."""
    if report.batches:
        table(
            (
                *("BATCH", "STATE", "DONE", "FAILED", "CANCELLED", "TOTAL"),
                *("ROWS/S", "TOKENS/S", "LEFT", "AGE", "MODEL", "FILE"),
            ),
            [_batch_row(batch) for batch in report.batches],
        )
    else:
        answer("no batches yet: put a file of prompts into batch_inputs/ or run `producer submit FILE`")
    answer("")
    table(("QUEUE", "PRIORITY", "WAITING"), [(row.model, row.priority, row.waiting) for row in report.queues])
    answer("")
    if not report.workers:
        answer("no workers: start one with `worker run`")
        return
    table(
        ("WORKER", "STATE", "DEVICE", "MODEL", "ROWS", "TOKENS/S", "MEMORY", "HEARTBEAT"),
        [_worker_row(worker) for worker in report.workers],
    )


def _worker_row(worker: WorkerReport) -> tuple[object, ...]:
    return (
        worker.name,
        worker.state,
        worker.device or "-",
        short(worker.model or "-", 24),
        "-" if worker.rows is None else worker.rows,
        "-" if worker.tokens_per_s is None else f"{worker.tokens_per_s:.1f}",
        "-" if worker.peak_memory_mb is None else f"{worker.peak_memory_mb} MB",
        f"{duration(worker.heartbeat_age_s)} ago",
    )


def _batch_row(batch: BatchReport) -> tuple[object, ...]:
    total = batch.submitted if batch.total is None else batch.total
    return (
        batch.batch,
        _state(batch),
        batch.done,
        batch.failed,
        batch.cancelled,
        f"{total}+" if batch.total is None else total,
        f"{batch.rate:.2f}",
        f"{batch.tokens_per_s:.1f}",
        "-" if batch.finished_at else duration(batch.eta_s),
        duration(max(0.0, time.time() - batch.created_at)),
        short(batch.model, 24),
        short(batch.source, 32),
    )


def _state(batch: BatchReport) -> str:
    return f"waits until {moment(batch.waits_until)}" if batch.waits_until else str(batch.state)


def batch(report: BatchReport) -> None:
    """One batch, a line a fact."""
    total = "still reading" if report.total is None else report.total
    facts: list[tuple[str, object]] = [
        ("batch", report.batch),
        ("file", report.source),
        ("model", report.model),
        ("priority", report.priority),
        *((("window", report.window),) if report.window else ()),
        ("state", _state(report)),
        ("total", total),
        ("submitted", report.submitted),
        ("done", report.done),
        *((("cached", f"{report.cached} of those done"),) if report.cached else ()),
        ("failed", report.failed),
        ("cancelled", f"{report.cancelled}{' (the file was not read to its end)' if report.unread else ''}"),
        ("rows/s", f"{report.rate:.2f}"),
        ("tokens/s", f"{report.tokens_per_s:.1f}"),
        ("elapsed", duration(report.elapsed_s)),
        ("left", "-" if report.finished_at else duration(report.eta_s)),
        *(("output", file) for file in report.files),
    ]
    answer("\n".join(f"{name:<10} {safe(str(value))}" for name, value in facts))


def missing(batch: Batch, ranges: Iterable[tuple[int, int]]) -> None:
    """What a batch that runs has no output for, on stderr: rows by index, from 0."""
    counts = batch.counts
    named: list[str] = []
    rows = more = 0
    for first, last in ranges:
        rows += last - first + 1
        if len(named) < RANGES_SHOWN:
            named.append(str(first) if first == last else f"{first}-{last}")
        else:
            more += 1
    others = f" and {more} more ranges" if more else ""
    ended = "".join(
        f", {count} {how}" for count, how in ((counts.failed, "failed"), (counts.cancelled, "cancelled")) if count
    )
    reading = "; the file is still being read" if counts.total is None else ""
    which = f" ({', '.join(named)}{others})" if named else ""
    say(f"missing: {rows} that wait or run{which}{ended}{reading}")


def failures(rows: Iterable[tuple[str, ErrorRow]]) -> int:
    """Failed rows with their batches, page after page, and for each code among them what to do; returns how many."""
    codes: set[ErrorCode] = set()
    count = 0
    rest = iter(rows)
    while page := list(itertools.islice(rest, PAGE)):
        table(
            ("BATCH", "ROW", "ID", "CODE", "TIME", "ATTEMPTS", "WORKER", "MESSAGE", "PROMPT"),
            [_failure(batch, row) for batch, row in page],
        )
        answer("")
        codes |= {row.error.code for _, row in page}
        count += len(page)
    for code in sorted(codes):
        answer(f"{code}: {REMEDIES[code]}")
    if count:
        answer("`producer logs BATCH:ROW` tells what the logs have of one")
    return count


def _failure(batch: str, row: ErrorRow) -> tuple[object, ...]:
    error, when = row.error, "-"
    if error.at is not None:
        when = datetime.fromtimestamp(error.at).strftime("%m-%d %H:%M:%S")
    shown = (error.code, when, error.attempts, short(row.worker or "-", 24), error.message, _prompt(row))
    return batch, row.index, short(row.id, 24), *shown


def diagnosis(found: Diagnosis) -> None:
    """What is wrong and what was or can be done about it, on one line."""
    if found.done is not None:
        outcome = f"fixed: {found.done}"
    elif found.refused is not None:
        outcome = f"not fixed: {found.refused}"
    else:
        outcome = f"--fix {found.remedy}" if found.fixable else f"{'note' if found.note else 'to do'}: {found.remedy}"
    answer(safe(f"{found.kind}  {found.where}: {found.what}; {outcome}"))


def preview(told: Preview) -> None:
    """What a source would come to: rows, what is wrong with some, how long the prompts are."""
    wrong = told.errors.total()
    answer(safe(f"{told.source}: {told.rows:,} rows, {told.jobs:,} can run, {wrong:,} cannot"))
    for code, count in told.errors.most_common():
        answer(f"  {count:,} {code}: {REMEDIES[code]}")
    for row in told.first:
        answer(safe(f"  {row.error.code}: {row.error.message}"))
    if wrong > len(told.first):
        answer(f"  … these are the first {len(told.first)}")
    if told.lengths:
        part = f", of the first {len(told.lengths):,}" if len(told.lengths) < told.jobs else ""
        middle, most = told.share(0.5), told.share(0.95)
        mean, total = sum(told.lengths) / len(told.lengths), sum(told.lengths)
        lengths = f"{min(told.lengths):,} to {max(told.lengths):,}, half up to {middle:,}, 95% up to {most:,}"
        answer(f"  {told.unit} of a prompt{part}: {lengths}, mean {mean:,.1f}, {total:,} together")
        answer(f"  tokens of the answers: up to {told.most_new_tokens:,} together")


def estimate(told: Sequence[Preview], last: Throughput | None, model: str) -> None:
    """How long it would take, judged by what a worker did before."""
    rows = sum(one.jobs for one in told)
    if last is None:
        answer(f"time: unknown, no worker has logged its throughput for model '{safe(model)}' here")
        return
    most = sum(one.most_new_tokens for one in told) / last.tokens_per_s if last.tokens_per_s else None
    pace = f"{last.rows_per_s:.2f} rows/s and {last.tokens_per_s:.1f} tokens/s"
    whose = safe(f"worker {last.worker} on {last.device}, {last.at[:16].replace('T', ' ')} UTC")
    limit = f", {duration(most)} if every answer is as long as it may be" if most is not None else ""
    answer(f"time: about {duration(rows / last.rows_per_s)} with answers like the last ones{limit} ({pace}: {whose})")


def _prompt(row: ErrorRow) -> str:
    if not isinstance(row.prompt, list):
        return short(row.prompt or "")
    last = row.prompt[-1] if row.prompt else ""
    return short(last.get("content", "") if isinstance(last, dict) else f"{len(row.prompt)} tokens")


def reading_bar() -> Progress:
    """Progress through a source file: bytes make the bar, rows and their rate stand beside it."""
    return _bar(BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[rows]}"))


def waiting_bar() -> Progress:
    """Progress of batches: how many rows have ended, and beside them what `progress` says."""
    return _bar(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))


def _bar(*columns: Any) -> Progress:
    console = Console(stderr=True)
    spinner = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    return Progress(*spinner, *columns, console=console, transient=True, disable=not console.is_terminal)


def near(file: str) -> str:
    """`file`, a path or an address, as a person in this folder would write it."""
    with contextlib.suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file
