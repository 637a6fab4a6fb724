"""The load: a closed loop. At each level so many clients send one call after the other, none before its last has ended.

That bounds what a server gets: never more calls at a time than the level says, and as many in all as the plan does.
Every round of a level sends the same prompts, so that rounds are the same work; before the first one its connections
and the server are warmed up, which does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx2

from producer.endpoint.client import Call, Kind, Target, call
from producer.endpoint.prompts import Prompt, PromptSet

PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LEAST_CALLS = 8
CALLS_PER_CLIENT = 4
"""Calls of a round for each client, so that the last ones, which run with fewer beside them, are a small part."""


@dataclass(frozen=True)
class Plan:
    """How much is sent: levels of concurrency, rounds of each, calls of a round (None: by the level), calls to warm up
    with for each client."""

    levels: tuple[int, ...]
    rounds: int
    calls: int | None
    warmup: int

    def calls_at(self, level: int) -> int:
        return self.calls or max(LEAST_CALLS, CALLS_PER_CLIENT * level)

    def warmup_at(self, level: int) -> int:
        return self.warmup * level

    @property
    def total(self) -> int:
        """Every call that will be made, the first one included."""
        return 1 + sum(self.rounds * self.calls_at(level) + self.warmup_at(level) for level in self.levels)


@dataclass(frozen=True)
class Round:
    """The calls of one round: `seconds` from the first one's start to the last one's end, `cpu_s` the client's own time
    in them. One that was interrupted holds the calls that had ended."""

    level: int
    number: int
    calls: tuple[Call, ...]
    seconds: float
    cpu_s: float
    complete: bool = True

    @property
    def answered(self) -> list[Call]:
        return [one for one in self.calls if one.failure is None]


async def measure(
    clients: Sequence[httpx2.AsyncClient],
    target: Target,
    plan: Plan,
    prompts: PromptSet,
    rounds: list[Round],
    say: Callable[[Round], None],
) -> str | None:
    """Fill `rounds`, also with one that is cancelled half way; returns why it stopped early, if it did.

    Of `clients` a level uses as many as it has calls at a time.
    """
    for level in plan.levels:
        used = clients[:level]
        await _round(used, target, prompts.spread(plan.warmup_at(level)), 0, [])
        for number in range(1, plan.rounds + 1):
            await _round(used, target, prompts.spread(plan.calls_at(level)), number, rounds)
            say(rounds[-1])
            if not rounds[-1].answered:
                return f"stopped after round {number} at concurrency {level}: not one call was answered"
    return None


def pause_after(done: Call) -> float:
    """Seconds that a client waits before its next call: what a busy server asks for, within reason."""
    failure = done.failure
    if failure is None or failure.kind not in (Kind.RATE_LIMITED, Kind.SERVER_ERROR):
        return 0.0
    if failure.retry_after_s is None:
        return PAUSE_S if failure.kind is Kind.RATE_LIMITED else 0.0
    return min(failure.retry_after_s, LONGEST_PAUSE_S)


async def _round(
    clients: Sequence[httpx2.AsyncClient], target: Target, prompts: Sequence[Prompt], number: int, rounds: list[Round]
) -> None:
    waiting, calls = iter(prompts), list[Call]()
    started, cpu = time.perf_counter(), time.process_time()
    complete = False

    async def one_after_the_other(client: httpx2.AsyncClient) -> None:
        for prompt in waiting:
            calls.append(await call(client, target, prompt))
            await asyncio.sleep(pause_after(calls[-1]))

    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(one_after_the_other(client))
        complete = True
    finally:
        ended = max((one.ended_at for one in calls), default=started)
        spent = time.process_time() - cpu
        rounds.append(Round(len(clients), number, tuple(calls), ended - started, spent, complete))
