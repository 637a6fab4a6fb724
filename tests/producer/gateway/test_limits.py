"""Admission: requests a minute and at a time of a key, and all of them beside what workers can do."""

from __future__ import annotations

import contextlib

import pytest

from contract.interactive import Capacity
from producer.gateway.errors import ApiError
from producer.gateway.limits import Caller, Limits, Measured

BOUND = Caller("alice", requests_per_minute=6, concurrent=2)
FREE = Caller("bob", requests_per_minute=0, concurrent=0)


def measured(rows: int = 10, workers: int = 1, running: int = 0, waiting: int = 0, own: int = 0) -> Measured:
    return Measured(Capacity(workers, rows, running, waiting, 0.0), own)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def status(call: object) -> tuple[int, str | None]:
    assert isinstance(call, pytest.ExceptionInfo)
    error = call.value
    assert isinstance(error, ApiError)
    return error.status_code, (error.headers or {}).get("Retry-After")


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    limits = Limits(0.8, clock)
    for _ in range(6):
        limits.count(BOUND)
    with pytest.raises(ApiError) as refused:
        limits.count(BOUND)
    assert status(refused) == (429, "10")
    clock.now = 10.0
    limits.count(BOUND)
    with pytest.raises(ApiError):
        limits.count(BOUND)
    clock.now = 1e6
    for _ in range(6):
        limits.count(BOUND)
    for _ in range(100):
        limits.count(FREE)


def test_requests_at_a_time_are_counted_down_again() -> None:
    limits = Limits(0.8)
    with limits.running(BOUND, "demo", 1, measured()), limits.running(BOUND, "demo", 1, measured()):
        with pytest.raises(ApiError) as refused, limits.running(BOUND, "demo", 1, measured()):
            pass
        assert status(refused)[0] == 429
        with limits.running(FREE, "demo", 1, measured()):
            assert limits.rows("demo") == 3
    assert limits.rows("demo") == 0
    with limits.running(BOUND, "demo", 1, measured()):
        pass


def test_requests_take_no_more_than_their_share_of_the_rows() -> None:
    limits = Limits(0.8)
    with contextlib.ExitStack() as running:
        for _ in range(8):
            running.enter_context(limits.running(FREE, "demo", 1, measured()))
        with pytest.raises(ApiError) as refused:
            running.enter_context(limits.running(FREE, "demo", 1, measured()))
        assert status(refused) == (429, "1")
        with pytest.raises(ApiError):
            running.enter_context(limits.running(FREE, "other", 8, measured(running=9, own=2)))
        running.enter_context(limits.running(FREE, "other", 1, measured(running=9, own=2)))
    with limits.running(FREE, "demo", 100, measured()):  # it would never fit, so it runs alone
        pass


def test_without_a_worker_nothing_is_admitted() -> None:
    with pytest.raises(ApiError) as refused, Limits(0.8).running(FREE, "demo", 1, measured(workers=0)):
        pass
    assert status(refused) == (503, "5")
