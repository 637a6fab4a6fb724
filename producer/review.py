"""How the last hours went, from the logs: the data behind `producer report`, and its plot.

Sums only, in bins of time, by worker, by model and by error code: memory does not grow with the logs, however many
there are. A micro-batch's tokens are spread evenly over the time that it took, so that long ones do not look like
bursts at their ends. Prints nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from contract.errors import UsageError
from producer.journals import moment_of, unordered

BINS = 60
"""At most so many."""
WIDTHS_S = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
MOST_WORKERS = 1_000
"""Workers beyond are summed up as one: with names made of process ids there may be many."""
OTHERS = "(others)"
EVENTS = (b'"batch_throughput"', b'"prompt_failed"', b'"prompt_retried"', b'"rows_submitted"')


class Stretch(BaseModel):
    """What was done in a stretch of time, or by a worker, or with a model.

    `busy_s` is the time in which at least one row was in the engine, summed over workers; rates are over it, but those
    of a time bin over its width. `queue_wait_s` is the mean over rows, `rows_in_flight` over the time.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    rows: int
    output_tokens: int
    tokens_per_s: float
    tokens_per_forward: float | None
    rows_in_flight: float
    queue_wait_s: float | None
    failed: int
    retried: int
    busy_s: float
    peak_memory_mb: int | None = None


class Review(BaseModel):
    """All of it. Times are seconds since the epoch; a bin's name is when it begins."""

    model_config = ConfigDict(frozen=True)

    since: float
    until: float
    bin_s: float
    total: Stretch
    bins: list[Stretch]
    workers: list[Stretch]
    models: list[Stretch]
    failures: dict[str, int]
    retries: dict[str, int]


@dataclass
class Sums:
    """Of one stretch; shares of micro-batches, so not whole numbers."""

    rows: float = 0.0
    tokens: float = 0.0
    forwards: float = 0.0
    row_seconds: float = 0.0
    waited: float = 0.0
    failed: int = 0
    retried: int = 0
    busy_s: float = 0.0
    peak_memory_mb: int = 0
    busy_until: float = 0.0

    def add(self, record: dict[str, Any], share: float) -> None:
        """A share of a micro-batch."""
        rows = _number(record, "rows") * share
        self.rows += rows
        self.tokens += _number(record, "output_tokens") * share
        self.forwards += _number(record, "forwards") * share
        self.row_seconds += _number(record, "row_seconds") * share
        self.waited += _number(record, "queue_wait_s") * rows
        self.peak_memory_mb = max(self.peak_memory_mb, int(_number(record, "peak_memory_mb")))

    def work(self, begin: float, end: float) -> float:
        """Its worker was at work from `begin` to `end`; what overlaps counts once. Returns how much was new."""
        new = max(0.0, end - max(begin, self.busy_until))
        self.busy_until = max(self.busy_until, end)
        self.busy_s += new
        return new

    def told(self, name: str, over_s: float | None = None) -> Stretch:
        """`over_s`: the time that rates are over, where it is not that of the work."""
        seconds = max(over_s or self.busy_s, 1e-9)
        return Stretch(
            name=name,
            rows=round(self.rows),
            output_tokens=round(self.tokens),
            tokens_per_s=round(self.tokens / seconds, 2) if over_s or self.busy_s else 0.0,
            tokens_per_forward=round(self.tokens / self.forwards, 3) if self.forwards else None,
            rows_in_flight=round(self.row_seconds / seconds, 2) if over_s or self.busy_s else 0.0,
            queue_wait_s=round(self.waited / self.rows, 3) if self.rows else None,
            failed=self.failed,
            retried=self.retried,
            busy_s=round(self.busy_s, 1),
            peak_memory_mb=self.peak_memory_mb or None,
        )


@dataclass
class Reviewer:
    """Adds up events, in any order but those of one worker in the order of time."""

    since: float
    until: float
    bin_s: float = 0.0
    bins: list[Sums] = field(default_factory=list)
    total: Sums = field(default_factory=Sums)
    workers: dict[str, Sums] = field(default_factory=dict)
    models: dict[str, Sums] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        span = self.until - self.since
        days = -(-span // (BINS * WIDTHS_S[-1])) * WIDTHS_S[-1]
        self.bin_s = next((float(width) for width in WIDTHS_S if span <= BINS * width), float(days))
        self.bins = [Sums() for _ in range(max(1, int(-(-span // self.bin_s))))]

    def add(self, event: dict[str, Any]) -> None:
        at = moment_of(event)
        if event["event"] == "batch_throughput":
            self._throughput(event, at)
        elif event["event"] in ("prompt_failed", "prompt_retried"):
            self._trouble(event, at, failed=event["event"] == "prompt_failed")
        elif event["event"] == "rows_submitted":
            self._unreadable(event, at)

    def _throughput(self, record: dict[str, Any], end: float) -> None:
        seconds = max(_number(record, "seconds"), 1e-6)
        begin, until = max(self.since, end - seconds), min(end, self.until)
        if until <= begin:
            return
        for number, share in self._shares(begin, until):
            self.bins[number].add(record, share * (until - begin) / seconds)
        worker, model = self._worker(record), self.models.setdefault(str(record.get("model")), Sums())
        for sums in (self.total, worker, model):
            sums.add(record, (until - begin) / seconds)
        new = worker.work(begin, until)
        self.total.busy_s += new
        model.busy_s += new

    def _shares(self, begin: float, end: float) -> Iterator[tuple[int, float]]:
        """The bins that a stretch of time lies in, and how much of it lies in each."""
        first, last = (min(int((at - self.since) / self.bin_s), len(self.bins) - 1) for at in (begin, end))
        for number in range(first, last + 1):
            left = self.since + number * self.bin_s
            right = end if number == last else left + self.bin_s
            yield number, max(0.0, min(end, right) - max(begin, left)) / (end - begin)

    def _trouble(self, event: dict[str, Any], at: float, failed: bool) -> None:
        code = str(event.get("code"))
        (self.failures if failed else self.retries)[code] += 1
        for sums in (self.total, self._worker(event), self._bin(at)):
            sums.failed += failed
            sums.retried += not failed

    def _unreadable(self, event: dict[str, Any], at: float) -> None:
        """Rows that were error rows as soon as they were read; which codes they have, only their rows tell."""
        parts = [part.partition("-") for part in str(event.get("unreadable") or "").split(",") if part]
        count = sum(int(last or first) - int(first) + 1 for first, _, last in parts)
        if count:
            self.failures["unreadable"] += count
            self.total.failed += count
            self._bin(at).failed += count

    def _bin(self, at: float) -> Sums:
        return self.bins[min(max(0, int((at - self.since) / self.bin_s)), len(self.bins) - 1)]

    def _worker(self, event: dict[str, Any]) -> Sums:
        name = str(event.get("worker"))
        if name not in self.workers and len(self.workers) >= MOST_WORKERS:
            name = OTHERS
        return self.workers.setdefault(name, Sums())

    def review(self) -> Review:
        most_first = sorted(self.workers.items(), key=lambda one: -one[1].tokens)
        return Review(
            since=self.since,
            until=self.until,
            bin_s=self.bin_s,
            total=self.total.told("total"),
            bins=[
                sums.told(str(round(self.since + number * self.bin_s)), self.bin_s)
                for number, sums in enumerate(self.bins)
            ],
            workers=[sums.told(name) for name, sums in most_first],
            models=[sums.told(name) for name, sums in sorted(self.models.items())],
            failures=dict(self.failures.most_common()),
            retries=dict(self.retries.most_common()),
        )


def review(folder: Path, since: float, until: float | None = None) -> Review:
    """What the logs in `folder` hold of the time from `since` to `until`, now unless set."""
    reviewer = Reviewer(since, max(until or time.time(), since + 1.0))
    for event in unordered(folder, lambda line: any(name in line for name in EVENTS), since):
        if moment_of(event) <= reviewer.until or event["event"] == "batch_throughput":
            reviewer.add(event)
    return reviewer.review()


def plot(found: Review, file: Path) -> None:
    """Draw it over time into `file` (.png, .svg or .pdf). Raises UsageError where it cannot be."""
    try:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'dllm-batch[plot]'") from None
    at = [datetime.fromtimestamp(float(one.name)) for one in found.bins]
    series: list[tuple[str, list[float | None]]] = [
        ("output tokens/s", [one.tokens_per_s for one in found.bins]),
        ("rows in flight", [one.rows_in_flight for one in found.bins]),
        ("queue wait, s", [one.queue_wait_s for one in found.bins]),
        ("tokens per forward", [one.tokens_per_forward for one in found.bins]),
        ("failed prompts", [float(one.failed) for one in found.bins]),
    ]
    figure = Figure(figsize=(9, 10), layout="constrained")
    axes = figure.subplots(len(series), 1, sharex=True)
    for axis, (label, values) in zip(axes, series, strict=True):
        axis.step(at, [float("nan") if value is None else value for value in values], where="post")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes[-1].xaxis.set_major_locator(locator)
    axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {file}: {error}") from None


def _number(record: dict[str, Any], name: str) -> float:
    found = record.get(name)
    return float(found) if isinstance(found, int | float) else 0.0
