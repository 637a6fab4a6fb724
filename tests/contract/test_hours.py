"""What `--not-before` and `--window` mean, in local time and with its clock changes, and who may run when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from redis import Redis

from contract.hours import FOR_EVER, STRETCH, Hours, clock_window, closed_until, moment

BERLIN = ZoneInfo("Europe/Berlin")
ASK = (
    STRETCH
    + "local opens, closes = open_stretch(ARGV[1], tonumber(ARGV[2])) return {tostring(opens), tostring(closes)}"
)


def local(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    if time.tzname != ("CET", "CEST"):
        pytest.skip("this machine has no time zones")
    yield
    monkeypatch.undo()
    time.tzset()


NOW = local("2026-12-02T12:00")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("22:00", "2026-12-02T22:00"),
        ("7:30", "2026-12-03T07:30"),
        ("12:00", "2026-12-03T12:00"),
        ("+2h", "2026-12-02T14:00"),
        ("+1d2h30m", "2026-12-03T14:30"),
        ("2026-12-03T22:00", "2026-12-03T22:00"),
        ("2027-07-01 22:00:30", "2027-07-01T22:00:30"),
        ("2026-12-03T22:00+05:00", "2026-12-03T18:00"),
        ("2026-12-03T21:00Z", "2026-12-03T22:00"),
    ],
)
def test_a_moment_is_local_time_unless_it_says_otherwise(text: str, meant: str) -> None:
    assert moment(text, NOW) == local(meant)


@pytest.mark.parametrize(
    "text", ["", "tonight", "25:00", "+", "+2", "2h", "+2x", "22:60", "2026-13-01T00:00", "0001-01-01"]
)
def test_what_is_no_moment_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"22:00 \(the next one\), 2026-12-03T22:00 or \+2h30m"):
        moment(text, NOW)


@pytest.mark.parametrize(
    "text", ["", "22:00", "22:00-", "-06:00", "22-6", "22:00-22:00", "22:00-24:00", "a-b", "1:00-2:00-3:00"]
)
def test_what_is_no_window_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(ValueError, match="such as 22:00-06:00"):
        clock_window(text)


def ask(redis: Redis, hours: Hours | None, at: str) -> tuple[str, str]:
    """From when to when a batch may run next, in Berlin's time, `now` being `at`."""
    assert hours is not None
    answer = redis.eval(ASK, 0, hours.model_dump_json(), local(at))
    opens, closes = (float(one) for one in answer)
    return shown(opens), "never" if closes == float("inf") else shown(closes)


def shown(at: float) -> str:
    return datetime.fromtimestamp(round(at), BERLIN).isoformat(timespec="minutes")[:16]


def window(text: str, not_before: str | None = None, now: str = "2026-12-02T12:00") -> Hours | None:
    return Hours.of(not_before, text, local(now))


@pytest.mark.parametrize(
    ("at", "opens", "closes"),
    [
        ("2026-12-02T12:00", "2026-12-02T22:00", "2026-12-03T06:00"),
        ("2026-12-02T22:00", "2026-12-02T22:00", "2026-12-03T06:00"),
        ("2026-12-03T05:59", "2026-12-03T05:59", "2026-12-03T06:00"),
        ("2026-12-03T06:00", "2026-12-03T22:00", "2026-12-04T06:00"),
        ("2027-03-27T23:00", "2027-03-27T23:00", "2027-03-28T06:00"),  # seven hours long
        ("2027-03-28T12:00", "2027-03-28T22:00", "2027-03-29T06:00"),
        ("2027-07-01T12:00", "2027-07-01T22:00", "2027-07-02T06:00"),
        ("2027-10-31T05:59", "2027-10-31T05:59", "2027-10-31T06:00"),  # nine hours long
        ("2027-10-31T12:00", "2027-10-31T22:00", "2027-11-01T06:00"),
        ("2029-08-01T12:00", "2029-08-01T22:00", "2029-08-02T06:00"),
        ("2040-12-02T12:00", "2040-12-02T22:00", "2040-12-03T06:00"),
    ],
)
def test_a_window_wraps_midnight_and_follows_the_clock(redis: Redis, at: str, opens: str, closes: str) -> None:
    assert ask(redis, window("22:00-06:00"), at) == (opens, closes)


def test_a_window_that_is_open_when_the_batch_is_made_is_open(redis: Redis) -> None:
    assert ask(redis, window("22:00-06:00", now="2026-12-02T01:00"), "2026-12-02T01:00")[1] == "2026-12-02T06:00"
    assert ask(redis, window("09:00-17:00"), "2026-12-02T12:00") == ("2026-12-02T12:00", "2026-12-02T17:00")


def test_a_window_that_the_clock_jumps_over_is_later_or_does_not_open_that_night(redis: Redis) -> None:
    assert ask(redis, window("02:10-02:50"), "2027-03-27T12:00") == ("2027-03-28T03:10", "2027-03-28T03:50")
    assert ask(redis, window("02:30-03:15"), "2027-03-27T12:00") == ("2027-03-29T02:30", "2027-03-29T03:15")
    assert ask(redis, window("02:30-03:15"), "2027-10-30T12:00") == ("2027-10-31T02:30", "2027-10-31T03:15")


def test_not_before_alone_opens_for_good_and_with_a_window_waits_for_it(redis: Redis) -> None:
    alone = Hours.of("2026-12-04T12:00", None, NOW)
    assert ask(redis, alone, "2026-12-02T12:00") == ("2026-12-04T12:00", "never")
    assert ask(redis, alone, "2026-12-05T12:00") == ("2026-12-05T12:00", "never")
    both = window("22:00-06:00", "2026-12-04T12:00")
    assert ask(redis, both, "2026-12-02T23:00") == ("2026-12-04T22:00", "2026-12-05T06:00")
    assert ask(redis, window("22:00-06:00", "2026-12-05T03:00"), "2026-12-02T23:00")[0] == "2026-12-05T03:00"


def test_hours_are_few_numbers_that_go_on_for_ever(redis: Redis) -> None:
    hours = window("22:00-06:00")
    assert hours is not None
    assert len(hours.stretches) < 20
    assert hours.stretches[-1].days == FOR_EVER
    assert Hours.model_validate_json(hours.model_dump_json()) == hours
    assert Hours.of(None, None, NOW) is None


def test_a_zone_without_clock_changes_has_one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    hours = window("22:00-06:00")
    assert hours is not None
    assert [(one.days, one.length) for one in hours.stretches] == [(FOR_EVER, 8 * 3600)]


def test_who_is_closed_is_told_by_the_servers_clock(redis: Redis) -> None:
    now = redis.time()[0]
    hours = [Hours(not_before=now - 10), Hours(not_before=now + 1000)]
    assert closed_until(redis, hours) == [None, now + 1000]
    assert closed_until(redis, []) == []
