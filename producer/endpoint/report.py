"""The report: one document, and what of it stands in tables, for the terminal and for Markdown alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from producer.endpoint.load import Round
from producer.endpoint.statistics import BUSY_CLIENT, Capacity, Level, Percentiles, Prices, capacity, level

Column = Callable[[Level], str]

FEW = 100
TIMES = {"first_token_s": "first token", "inter_block_s": "inter-block", "end_to_end_s": "end to end"}


class Report(BaseModel):
    """Everything that was measured, and how."""

    model_config = ConfigDict(frozen=True)

    interrupted: bool
    levels: tuple[Level, ...]
    capacity: Capacity | None
    notes: tuple[str, ...]
    conditions: dict[str, Any]

    @property
    def failed(self) -> int:
        return sum(one.calls - one.answered for one in self.levels)


@dataclass(frozen=True)
class Sheet:
    """A table: a title, its columns' names, and its cells as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def report(
    rounds: Sequence[Round], prices: Prices, conditions: dict[str, Any], notes: Iterable[str], interrupted: bool
) -> Report:
    """The report of all rounds that hold a call, by level in the order of measuring."""
    held = [one for one in rounds if one.calls]
    concurrencies = list(dict.fromkeys(one.level for one in held))
    levels = tuple(level([one for one in held if one.level == wanted], prices) for wanted in concurrencies)
    told = [*notes, *_remarks(levels, conditions)]
    return Report(
        interrupted=interrupted, levels=levels, capacity=capacity(levels), notes=tuple(told), conditions=conditions
    )


def _remarks(levels: Sequence[Level], conditions: dict[str, Any]) -> Iterable[str]:
    """What a reader must know to read the figures right."""
    missing = sum(one.without_usage for one in levels)
    if missing:
        answered = sum(one.answered for one in levels)
        what = f"{missing} of {answered} answers came without usage"
        yield f"{what}, so there are no token rates: {_get_usage(conditions)}"
    if conditions["stream"] and levels and not any(one.first_token_s for one in levels):
        yield "the server answered in one piece although asked to stream: there is no time to the first token"
    busy = [str(one.concurrency) for one in levels if one.client_cpu_share > BUSY_CLIENT]
    if busy:
        yield (
            f"at concurrency {', '.join(busy)} this client was busy more than {BUSY_CLIENT:.0%} of the time: "
            "the figures may be its limit and not the server's"
        )
    few = [one for one in levels if one.answered < FEW]
    if few:
        yield f"of fewer than {FEW} calls P99 is the longest: raise --calls or --rounds where it matters"
    sent = max(conditions["calls_per_round"])
    if conditions["prompts"]["count"] < sent:
        yield "a round sends prompts more than once: a server that keeps prefixes or answers has less to do for them"


def _get_usage(conditions: dict[str, Any]) -> str:
    if conditions["stream"]:
        return "measure with --no-stream, or have the server send usage in streams (stream_options.include_usage)"
    return "have the server send usage in its answers"


def sheets(found: Report) -> Iterable[Sheet]:
    """Throughput, tokens, times and failures; the last only where there are some."""
    yield _throughput(found.levels)
    yield _tokens(found.levels)
    yield Sheet(
        "Milliseconds, of all answered calls",
        ("concurrency", "time", "P50", "P95", "P99", "max", "n"),
        tuple(
            (str(one.concurrency), name, *_milliseconds(times))
            for one in found.levels
            for field, name in TIMES.items()
            if (times := getattr(one, field)) is not None
        ),
    )
    if found.failed:
        yield Sheet(
            "Calls that failed",
            ("concurrency", "calls", "failed", "timed out", "why"),
            tuple(
                (str(one.concurrency), str(one.calls), f"{one.error_rate:.1%}", f"{one.timeout_rate:.1%}", _why(one))
                for one in found.levels
                if one.failures
            ),
        )


def _throughput(levels: Sequence[Level]) -> Sheet:
    columns: dict[str, Column] = {
        "concurrency": lambda one: str(one.concurrency),
        "tokens/s": lambda one: _median(one.output_tokens_per_s, 1),
        "min – max": lambda one: _extremes(one.output_tokens_per_s),
        "outlier rounds": lambda one: _outliers(one.output_tokens_per_s),
        "calls/s": lambda one: _median(one.calls_per_s, 2),
        "answered": lambda one: f"{one.answered} of {one.calls}",
    }
    return _sheet("Output tokens per second, median of rounds", columns, levels)


def _tokens(levels: Sequence[Level]) -> Sheet:
    columns: dict[str, Column] = {
        "concurrency": lambda one: str(one.concurrency),
        "out": lambda one: _number(one.tokens_per_minute.output, 0),
        "in + out": lambda one: _number(one.tokens_per_minute.with_input, 0),
        "a call": lambda one: _number(one.output_tokens.mean if one.output_tokens else None, 1),
        "an arrival": lambda one: _number(one.tokens_per_arrival, 1),
    }
    costs: dict[str, Column] = {
        "1000 calls cost": lambda one: _number(one.cost_per_thousand_calls.by_tokens, 4),
        "by hours": lambda one: _number(one.cost_per_thousand_calls.by_hours, 4),
    }
    columns |= {name: cell for name, cell in costs.items() if any(cell(one) != NOTHING for one in levels)}
    return _sheet("Tokens per minute, output tokens a call and an arrival", columns, levels)


def _sheet(title: str, columns: Mapping[str, Column], levels: Sequence[Level]) -> Sheet:
    return Sheet(title, tuple(columns), tuple(tuple(cell(one) for cell in columns.values()) for one in levels))


def lines(found: Report) -> Iterable[str]:
    """What stands under the tables: the capacity, and the notes."""
    best = found.capacity
    if best is not None:
        more = "; it was still rising there, so try more" if best.still_rising else ""
        yield (
            f"capacity: {best.output_tokens_per_s:.1f} output tokens/s at concurrency {best.concurrency}{more}; "
            f"a service should admit no more than {best.safe_output_tokens_per_s:.1f}"
        )
    if found.interrupted:
        yield "interrupted: this is what was measured until then"
    yield from (f"note: {note}" for note in found.notes)


def facts(conditions: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """The conditions as lines of a name and a text."""
    for name, value in conditions.items():
        if isinstance(value, dict) and name in ("client", "prompts"):
            yield from ((f"{name} {key}", _plain(one)) for key, one in value.items())
        else:
            yield name, _plain(value)


NOTHING = "-"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items()) or NOTHING
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NOTHING
    return NOTHING if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _median(values: dict[str, Any] | None, digits: int) -> str:
    return _number(values["median"] if values else None, digits)


def _extremes(values: dict[str, Any] | None) -> str:
    return f"{values['min']:.1f} – {values['max']:.1f}" if values else NOTHING


def _outliers(values: dict[str, Any] | None) -> str:
    return ", ".join(str(at + 1) for at in values["outliers"]) if values and values["outliers"] else NOTHING


def _milliseconds(times: Percentiles) -> tuple[str, ...]:
    return (*(f"{1000 * one:.1f}" for one in (times.p50, times.p95, times.p99, times.max)), str(times.count))


def _why(one: Level) -> str:
    return "; ".join(f"{count} {kind}: {one.first_messages[kind]}" for kind, count in one.failures.items())
