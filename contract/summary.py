"""What a batch came to: counts, tokens, times and cost, for `batch_outputs/{name}.summary.json`.

Rows are added one at a time while they are published; memory does not grow with them. Percentiles are those of times
rounded to three significant digits, of which there are a few thousand however many rows there are: what is said is
exact to these digits, and to the millisecond below a second.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from contract.jobs import SCHEMA
from contract.ledger import Batch, Prices

DISTRIBUTIONS = ("dllm-batch", "torch", "transformers", "rq", "redis")
PERCENTILES = (50, 95, 99)
HOUR_S = 3600.0
MILLION = 1e6


class Times:
    """Seconds of many rows, to three significant digits."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()

    def add(self, seconds: float) -> None:
        self._counts[float(f"{seconds:.3g}")] += 1

    def percentiles(self) -> dict[str, float] | None:
        """`p50`, `p95`, `p99` by nearest rank: the smallest time that so many percent of the rows did not exceed."""
        total = self._counts.total()
        if not total:
            return None
        found: dict[str, float] = {}
        seen, ranks = 0, [(percent, -(-percent * total // 100)) for percent in PERCENTILES]
        for seconds in sorted(self._counts):
            seen += self._counts[seconds]
            while ranks and seen >= ranks[0][1]:
                found[f"p{ranks.pop(0)[0]}"] = seconds
        return found


class Summary:
    """The sums of one batch's rows, as they are published."""

    def __init__(self) -> None:
        self._errors: Counter[str] = Counter()
        self._finish_reasons: Counter[str] = Counter()
        self._workers: set[str] = set()
        self._prompt_tokens = self._completion_tokens = self._forwards = 0
        self._queued, self._denoised = Times(), Times()
        self._rows = self._done = self._cached = self._cached_tokens = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """An output row or an error row."""
        self._rows += 1
        if "output" not in row:
            self._errors[str(row["error"]["code"])] += 1
            return
        self._done += 1
        self._finish_reasons[str(row.get("finish_reason"))] += 1
        self._workers.add(str(row.get("worker")))
        usage, timing = _fields(row, "usage"), _fields(row, "timing")
        self._queued.add(_number(timing, "queued_s"))
        if row.get("cached"):
            self._cached += 1
            self._cached_tokens += int(_number(usage, "completion_tokens"))
            return
        self._prompt_tokens += int(_number(usage, "prompt_tokens"))
        self._completion_tokens += int(_number(usage, "completion_tokens"))
        self._forwards += int(_number(_fields(row, "denoise"), "forwards"))
        self._denoised.add(_number(timing, "denoise_s"))

    def document(self, record: Batch, now: float) -> dict[str, Any]:
        """All of it as JSON. Times are the server's, in seconds since the epoch; `now` where no row's end is known."""
        spec = record.spec
        cancelled = self._errors["cancelled"]
        finished = max(record.ended_at or 0.0, record.cancelled_at or 0.0) or now
        running_s = finished - record.started_at if record.started_at else None
        document: dict[str, Any] = {
            "batch": spec.batch,
            "source": spec.source,
            "model": spec.model,
            "priority": spec.priority,
            "rows": {
                "total": self._rows,
                "done": self._done,
                "failed": self._rows - self._done - cancelled,
                "cancelled": cancelled,
            },
            "cached": {"rows": self._cached, "completion_tokens": self._cached_tokens},
            "errors": dict(sorted(self._errors.items())),
            "finish_reasons": dict(sorted(self._finish_reasons.items())),
            "tokens": {"prompt": self._prompt_tokens, "completion": self._completion_tokens},
            "time": {
                "submitted_at": round(spec.created_at, 3),
                "started_at": _rounded(record.started_at),
                "finished_at": round(finished, 3),
                "wall_s": round(max(0.0, finished - spec.created_at), 3),
                "running_s": _rounded(running_s),
            },
            "tokens_per_s": _rounded(self._completion_tokens / running_s) if running_s and running_s > 0 else None,
            "tokens_per_forward": _rounded(self._completion_tokens / self._forwards) if self._forwards else None,
            "queued_s": self._queued.percentiles(),
            "denoise_s": self._denoised.percentiles(),
            "workers": len(self._workers),
        }
        if spec.prices:
            document["estimated_cost"] = self._cost(spec.prices, running_s or 0.0)
        return document | {"params": spec.params.model_dump(exclude_none=True), "versions": versions()}

    def _cost(self, prices: Prices, running_s: float) -> dict[str, float]:
        """By hours: as if each worker that answered had this batch alone, from the first start to the last end."""
        found: dict[str, float] = {}
        if prices.per_hour is not None:
            hours = running_s / HOUR_S * max(1, len(self._workers))
            found |= {"worker_hours": round(hours, 6), "by_hours": round(hours * prices.per_hour, 6)}
        if prices.per_million_input is not None or prices.per_million_output is not None:
            tokens = self._prompt_tokens * (prices.per_million_input or 0.0)
            tokens += self._completion_tokens * (prices.per_million_output or 0.0)
            found["by_tokens"] = round(tokens / MILLION, 6)
        return found


@cache
def versions() -> dict[str, str | int]:
    """Versions of what is installed where the batch is published, as far as it matters to its outputs."""
    found: dict[str, str | int] = {"schema": SCHEMA, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _fields(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Rows that were published before may have been edited: what is not as we wrote it counts as nothing."""
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def _number(fields: Mapping[str, Any], name: str) -> float:
    found = fields.get(name)
    return found if isinstance(found, int | float) else 0.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
