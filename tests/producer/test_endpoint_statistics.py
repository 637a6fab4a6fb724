"""Known calls, known figures."""

from __future__ import annotations

from typing import Any

import pytest

from producer.endpoint.client import Call, Failure, Kind
from producer.endpoint.load import Round
from producer.endpoint.statistics import Percentiles, Prices, capacity, level

NO_PRICES = Prices()


def answer(seconds: float = 1.0, **values: Any) -> Call:
    usual = {"prompt_tokens": 30, "output_tokens": 10, "first_s": seconds / 4, "gaps_s": (seconds / 4,) * 3}
    return Call(**{"sent_at": 0.0, "seconds": seconds, "finish_reason": "stop", **usual, **values})


def failed(kind: Kind = Kind.SERVER_ERROR, message: str = "no") -> Call:
    return Call(sent_at=0.0, seconds=9.0, failure=Failure(kind, message))


def rounds(*of: list[Call], seconds: float = 2.0, concurrency: int = 4, **values: Any) -> list[Round]:
    return [Round(concurrency, at, tuple(calls), seconds, 0.1, **values) for at, calls in enumerate(of, start=1)]


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    found = Percentiles.of([float(value) for value in range(100, 0, -1)])
    assert found == Percentiles(p50=50.0, p95=95.0, p99=99.0, max=100.0, mean=50.5, count=100)
    assert Percentiles.of([3.0, 1.0, 2.0]) == Percentiles(p50=2.0, p95=3.0, p99=3.0, max=3.0, mean=2.0, count=3)
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p95=7.0, p99=7.0, max=7.0, mean=7.0, count=1)
    assert Percentiles.of([]) is None


def test_rates_are_medians_over_rounds_and_outliers_are_marked_and_kept() -> None:
    four, one = [answer()] * 4, [answer()]
    found = level(rounds(four, four, four, four, one), NO_PRICES)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s["median"] == 20.0
    assert found.output_tokens_per_s["rounds"] == [20.0, 20.0, 20.0, 20.0, 5.0]
    assert found.output_tokens_per_s["outliers"] == [4]
    assert found.calls_per_s is not None
    assert found.calls_per_s["median"] == 2.0
    assert found.tokens_per_minute.output == 20.0 * 60
    assert found.tokens_per_minute.with_input == (20.0 + 60.0) * 60
    assert (found.concurrency, found.rounds, found.calls, found.answered) == (4, 5, 17, 17)
    assert found.client_cpu_share == 0.05


def test_times_are_those_of_answered_calls_of_all_rounds() -> None:
    found = level(rounds([answer(1.0), answer(2.0)], [answer(4.0), failed()]), NO_PRICES)
    assert found.end_to_end_s == Percentiles(p50=2.0, p95=4.0, p99=4.0, max=4.0, mean=round(7 / 3, 6), count=3)
    assert found.first_token_s is not None
    assert (found.first_token_s.p50, found.first_token_s.max) == (0.5, 1.0)
    assert found.inter_block_s is not None
    assert (found.inter_block_s.p50, found.inter_block_s.count) == (0.5, 9)
    assert found.tokens_per_arrival == 2.5  # ten tokens in four arrivals
    assert found.finish_reasons == {"stop": 3}


def test_a_call_that_failed_gives_no_tokens_and_counts_as_an_error() -> None:
    calls = [answer(), failed(Kind.TIMEOUT, "no whole answer"), failed(message="first"), failed(message="second")]
    found = level(rounds(calls), NO_PRICES)
    assert (found.error_rate, found.timeout_rate) == (0.75, 0.25)
    assert found.failures == {"server_error": 2, "timeout": 1}
    assert found.first_messages == {"server_error": "first", "timeout": "no whole answer"}
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s["median"] == 5.0


def test_one_answer_without_usage_leaves_token_rates_unknown_and_nothing_else() -> None:
    found = level(rounds([answer(), answer(output_tokens=None)]), Prices(per_million_output=1.0, per_hour=1.0))
    assert found.without_usage == 1
    assert found.output_tokens_per_s is None
    assert found.tokens_per_minute.output is None
    assert found.cost_per_thousand_calls.by_tokens is None
    assert found.cost_per_thousand_calls.by_hours is not None
    assert found.calls_per_s is not None
    without_input = level(rounds([answer(prompt_tokens=None)]), NO_PRICES)
    assert (without_input.tokens_per_minute.output, without_input.tokens_per_minute.with_input) == (300.0, None)


def test_an_interrupted_round_gives_its_calls_and_no_rate() -> None:
    whole, broken = rounds([answer()] * 4), rounds([answer(3.0)], complete=False)
    found = level([*whole, *broken], NO_PRICES)
    assert (found.rounds, found.calls) == (1, 5)
    assert found.output_tokens_per_s is not None
    assert found.output_tokens_per_s["rounds"] == [20.0]
    assert found.end_to_end_s is not None
    assert found.end_to_end_s.max == 3.0
    assert level(broken, NO_PRICES).output_tokens_per_s is None


def test_the_cost_of_a_thousand_calls() -> None:
    prices = Prices(per_hour=3.6, per_million_input=1.0, per_million_output=2.0)
    found = level(rounds([answer()] * 4, [answer()] * 4), prices)
    assert found.cost_per_thousand_calls.by_tokens == pytest.approx((30 * 1.0 + 10 * 2.0) / 1e6 * 1000)
    assert found.cost_per_thousand_calls.by_hours == pytest.approx(3.6 * (4.0 / 3600) / 8 * 1000)
    assert level(rounds([failed()]), prices).cost_per_thousand_calls.by_hours is None


def test_capacity_is_the_best_level_of_which_hardly_a_call_failed() -> None:
    slow = level(rounds([answer()] * 2, concurrency=1), NO_PRICES)
    best = level(rounds([answer()] * 8, concurrency=4), NO_PRICES)
    beyond = level(rounds([answer()] * 20 + [failed()], concurrency=16), NO_PRICES)
    found = capacity([slow, best, beyond])
    assert found is not None
    assert (found.output_tokens_per_s, found.concurrency) == (40.0, 4)
    assert found.safe_output_tokens_per_s == 32.0
    assert not found.still_rising
    rising = capacity([slow, best])
    assert rising is not None
    assert rising.still_rising
    assert capacity([level(rounds([answer(output_tokens=None)]), NO_PRICES)]) is None
