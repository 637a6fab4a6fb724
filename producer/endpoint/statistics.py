"""From rounds to figures: what each level of concurrency came to. Plain numbers in, plain numbers out.

Rates are of whole rounds: their median counts, outliers are marked and kept. Times are of calls: percentiles over all
answered ones of all rounds. Nothing is estimated: a rate of tokens needs the usage of every answered call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from contract.series import summary
from producer.endpoint.client import Call, Kind
from producer.endpoint.load import Round

MINUTE_S, HOUR_S = 60.0, 3600.0
MILLION, THOUSAND = 1e6, 1e3
STEADY = 0.01
"""A level with a larger share of failed calls is beyond what the endpoint can do."""
SAFE_SHARE = 0.8
"""Of the capacity: what a service should admit, as operations.md says of our own."""
BUSY_CLIENT = 0.8
"""Share of a core from which on the client's own work may be what is measured."""


class Percentiles(BaseModel):
    """Seconds (or counts) of many calls, by nearest rank: the smallest value that so many percent did not exceed."""

    model_config = ConfigDict(frozen=True)

    p50: float
    p95: float
    p99: float
    max: float
    mean: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles | None:
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in (50, 95, 99))
        mean = sum(ordered) / len(ordered)
        rounded = [round(value, 6) for value in (p50, p95, p99, ordered[-1], mean)]
        return Percentiles(**dict(zip(("p50", "p95", "p99", "max", "mean"), rounded, strict=True)), count=len(ordered))


class TokensPerMinute(BaseModel):
    """Medians over rounds."""

    model_config = ConfigDict(frozen=True)

    output: float | None
    with_input: float | None


class Cost(BaseModel):
    """Of a thousand answered calls, in the currency of the prices."""

    model_config = ConfigDict(frozen=True)

    by_tokens: float | None = None
    by_hours: float | None = None


class Level(BaseModel):
    """One level of concurrency. `summary` dictionaries are those of `contract.series`: median, extremes, all rounds."""

    model_config = ConfigDict(frozen=True)

    concurrency: int
    rounds: int
    calls: int
    answered: int
    failures: dict[str, int]
    first_messages: dict[str, str]
    error_rate: float
    timeout_rate: float
    without_usage: int
    output_tokens_per_s: dict[str, Any] | None
    calls_per_s: dict[str, Any] | None
    tokens_per_minute: TokensPerMinute
    end_to_end_s: Percentiles | None
    first_token_s: Percentiles | None
    inter_block_s: Percentiles | None
    output_tokens: Percentiles | None
    prompt_tokens: Percentiles | None
    tokens_per_arrival: float | None
    finish_reasons: dict[str, int]
    cost_per_thousand_calls: Cost
    client_cpu_share: float


class Capacity(BaseModel):
    """The most output tokens per second among levels of which hardly a call failed."""

    model_config = ConfigDict(frozen=True)

    output_tokens_per_s: float
    concurrency: int
    safe_output_tokens_per_s: float
    still_rising: bool


@dataclass(frozen=True)
class Prices:
    """Of an hour of all that serves the endpoint, and of a million tokens."""

    per_hour: float | None = None
    per_million_input: float | None = None
    per_million_output: float | None = None


def level(rounds: Sequence[Round], prices: Prices) -> Level:
    """The figures of one level's rounds. Rates are of complete rounds; an interrupted one gives its calls."""
    calls = [call for one in rounds for call in one.calls]
    answered = [call for one in rounds for call in one.answered]
    whole = [one for one in rounds if one.complete]
    failures = Counter(str(call.failure.kind) for call in calls if call.failure)
    output = None if _missing(answered, "output_tokens") else _rates(whole, "output_tokens")
    prompt = None if _missing(answered, "prompt_tokens") else _rates(whole, "prompt_tokens")
    calls_per_s = [len(one.answered) / one.seconds for one in whole]
    seconds = sum(one.seconds for one in rounds)
    return Level(
        concurrency=rounds[0].level,
        rounds=len(whole),
        calls=len(calls),
        answered=len(answered),
        failures=dict(failures.most_common()),
        first_messages={str(call.failure.kind): call.failure.message for call in reversed(calls) if call.failure},
        error_rate=round(failures.total() / len(calls), 4),
        timeout_rate=round(failures[Kind.TIMEOUT] / len(calls), 4),
        without_usage=_missing(answered, "output_tokens"),
        output_tokens_per_s=summary(output) if output else None,
        calls_per_s=summary(calls_per_s, 3) if calls_per_s else None,
        tokens_per_minute=TokensPerMinute(
            output=_minute(output),
            with_input=_minute([a + b for a, b in zip(output, prompt, strict=True)]) if output and prompt else None,
        ),
        end_to_end_s=Percentiles.of([call.seconds for call in answered]),
        first_token_s=Percentiles.of([call.first_s for call in answered if call.first_s is not None]),
        inter_block_s=Percentiles.of([gap for call in answered for gap in call.gaps_s]),
        output_tokens=Percentiles.of([call.output_tokens for call in answered if call.output_tokens is not None]),
        prompt_tokens=Percentiles.of([call.prompt_tokens for call in answered if call.prompt_tokens is not None]),
        tokens_per_arrival=_tokens_per_arrival(answered),
        finish_reasons=dict(Counter(str(call.finish_reason) for call in answered).most_common()),
        cost_per_thousand_calls=_cost(answered, seconds, prices),
        client_cpu_share=round(sum(one.cpu_s for one in rounds) / seconds, 3) if seconds else 0.0,
    )


def capacity(levels: Sequence[Level]) -> Capacity | None:
    """None where no level has both usage and hardly a failure. Still rising: the most was reached at the last level."""
    steady = [one for one in levels if one.error_rate <= STEADY]
    rates = {one.concurrency: one.output_tokens_per_s["median"] for one in steady if one.output_tokens_per_s}
    if not rates:
        return None
    at = max(rates, key=lambda concurrency: rates[concurrency])
    safe = round(SAFE_SHARE * rates[at], 2)
    rising = len(rates) > 1 and at == max(one.concurrency for one in levels)
    return Capacity(output_tokens_per_s=rates[at], concurrency=at, safe_output_tokens_per_s=safe, still_rising=rising)


def _missing(answered: Sequence[Call], tokens: str) -> int:
    return sum(getattr(call, tokens) is None for call in answered)


def _rates(rounds: Sequence[Round], tokens: str) -> list[float]:
    return [sum(getattr(call, tokens) for call in one.answered) / one.seconds for one in rounds]


def _minute(rates: Sequence[float] | None) -> float | None:
    return round(MINUTE_S * summary(rates, 6)["median"], 1) if rates else None


def _tokens_per_arrival(answered: Sequence[Call]) -> float | None:
    """Over streamed calls whose usage is known: how many tokens one arrival of text brings."""
    known = [(call.output_tokens, 1 + len(call.gaps_s)) for call in answered if call.output_tokens and call.first_s]
    return round(sum(tokens for tokens, _ in known) / sum(count for _, count in known), 2) if known else None


def _cost(answered: Sequence[Call], seconds: float, prices: Prices) -> Cost:
    """By tokens: of the mean call. By hours: of the time that a thousand answers take at this level."""
    if not answered:
        return Cost()
    by_hours = None
    if prices.per_hour is not None:
        by_hours = round(prices.per_hour * seconds / HOUR_S / len(answered) * THOUSAND, 6)
    return Cost(by_tokens=_by_tokens(answered, prices), by_hours=by_hours)


def _by_tokens(answered: Sequence[Call], prices: Prices) -> float | None:
    parts = {"prompt_tokens": prices.per_million_input, "output_tokens": prices.per_million_output}
    wanted = {tokens: price for tokens, price in parts.items() if price is not None}
    if not wanted or any(_missing(answered, tokens) for tokens in wanted):
        return None
    paid: float = sum(price * getattr(call, tokens) for tokens, price in wanted.items() for call in answered)
    return round(paid / MILLION / len(answered) * THOUSAND, 6)
