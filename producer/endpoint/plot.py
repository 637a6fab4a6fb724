"""The report as a picture: throughput and times over concurrency."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.errors import UsageError
from producer.endpoint.report import TIMES, Report
from producer.endpoint.statistics import Level

INSTALL = "--plot needs matplotlib: pip install 'dllm-batch[plot]'"


def require() -> None:
    """Raises UsageError where matplotlib is not installed, so that nobody measures for a plot that cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(INSTALL)


def draw(found: Report, target: Path) -> None:
    """Write a PNG: output tokens/s (median, and from least to most), then each kind of time (P50, P95, P99)."""
    from matplotlib.figure import Figure

    times = {field: name for field, name in TIMES.items() if any(getattr(one, field) for one in found.levels)}
    figure = Figure(figsize=(4 * (1 + len(times)), 3.6), layout="constrained")
    throughput, *places = figure.subplots(1, 1 + len(times), squeeze=False)[0]
    _throughput(throughput, [one for one in found.levels if one.output_tokens_per_s])
    for place, (field, name) in zip(places, times.items(), strict=True):
        _times(place, [one for one in found.levels if getattr(one, field)], field, name)
    figure.suptitle(f"{found.conditions['model']} at {found.conditions['base_url']}", parse_math=False)
    try:
        figure.savefig(target, dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None


def _throughput(place: Any, levels: Sequence[Level]) -> None:
    rates = [one.output_tokens_per_s or {} for one in levels]
    at = [one.concurrency for one in levels]
    place.plot(at, [rate["median"] for rate in rates], marker="o")
    place.fill_between(at, [rate["min"] for rate in rates], [rate["max"] for rate in rates], alpha=0.2)
    place.set(title="output tokens/s", xlabel="concurrency", xticks=at, ylim=(0, None))
    place.grid(alpha=0.3)


def _times(place: Any, levels: Sequence[Level], field: str, name: str) -> None:
    at = [one.concurrency for one in levels]
    for percentile in ("p50", "p95", "p99"):
        values = [1000 * getattr(getattr(one, field), percentile) for one in levels]
        place.plot(at, values, marker="o", label=percentile.upper())
    place.set(title=f"{name} (ms)", xlabel="concurrency", xticks=at, ylim=(0, None))
    place.grid(alpha=0.3)
    place.legend()
