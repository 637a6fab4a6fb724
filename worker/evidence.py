"""What is known of the crashes that a prompt ran through, for the error row of one that is quarantined.

Nothing depends on it: where the server cannot be asked, or nothing was noted, the row says less.

    dllm:lives:{worker}     hash: when a process of that name began -> JSON: step, rows and peak memory at its last
                            heartbeat, what `producer status` shows of a worker (model, device, tokens per second),
                            and how it ended where that is known. A process that left in order has none.
    dllm:crashes:{batch}    hash: {index}:{n} -> worker and time of the start that was cut short by the n-th crash

Both expire a day after the last write. Times are texts of one format by the worker's own clock, so those of one worker
can be compared as they are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError

from contract.names import Connection
from contract.queues import lives

KEPT_S = 86_400
LIVES = 16
"""So many lives of one name are kept."""

Vitals = Callable[[], Mapping[str, str | int | float]]
"""step, rows and peak_memory_mb at this moment, and what else is shown of a worker."""


class Evidence:
    """One worker's notes. `began` is when its process began; `most` the crashes of a prompt that are told."""

    def __init__(self, redis: Connection, worker: str, began: str, vitals: Vitals, most: int) -> None:
        self._redis = redis
        self._began = began
        self._lives = lives(redis.names, worker)
        self._vitals = vitals
        self._last: dict[str, Any] = {}
        self._most = most

    # Of the process

    def begin(self, predecessor: str | None) -> None:
        """`predecessor`: how the process of this name before us ended, where whoever started us knows it.

        What that one said itself stays.
        """
        known = self._known(self._lives)
        if predecessor and known:
            self._record(self._redis, max(known), {"how": predecessor, **known[max(known)]})
        if old := sorted(known)[:-LIVES]:
            self._redis.hdel(self._lives, *old)

    def beat(self, pipe: Pipeline) -> None:
        """Queue on `pipe`: this is how the process stands."""
        self._last = dict(self._vitals())
        self._record(pipe, self._began, self._last)

    def ended(self, how: str) -> None:
        """The last words of a process that does not leave in order. Its device is not asked once more."""
        self._record(self._redis, self._began, {**self._last, "how": how})

    def left(self) -> None:
        """The process leaves in order: no start of a prompt was cut short."""
        self._redis.hdel(self._lives, self._began)

    def _record(self, connection: Redis | Pipeline, began: str, life: Mapping[str, Any]) -> None:
        connection.hset(self._lives, began, json.dumps(life))
        connection.expire(self._lives, KEPT_S)

    # Of a prompt

    def note(self, batch: str, index: int, crash: int, worker: str, started_at: str) -> None:
        """The prompt's start by `worker` never ended, and was its `crash`-th of that kind. The first note counts."""
        with contextlib.suppress(RedisError), self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(self._crashes(batch), f"{index}:{crash}", f"{worker} {started_at}")
            pipe.expire(self._crashes(batch), KEPT_S)
            pipe.execute()

    def forget(self, pipe: Pipeline, batch: str, index: int) -> None:
        """Queue on `pipe`: the prompt came to an end, or to another attempt."""
        pipe.hdel(self._crashes(batch), *self._names(index))

    def of(self, batch: str, index: int) -> str:
        """`worker (how it ended; step, rows, memory), …` for the crashes of a prompt that were noted, else ''."""
        with contextlib.suppress(RedisError, ValueError):
            notes = cast("list[bytes | None]", self._redis.hmget(self._crashes(batch), self._names(index)))
            return ", ".join(self._told(*note.decode().split(" ", 1)) for note in notes if note)
        return ""

    def _names(self, index: int) -> list[str]:
        return [f"{index}:{crash}" for crash in range(1, self._most + 1)]

    def _told(self, worker: str, started_at: str) -> str:
        known = self._known(lives(self._redis.names, worker))
        began = max((began for began in known if began <= started_at), default=None)
        return f"{worker} ({'; '.join(_facts(known[began] if began else {}))})"

    def _crashes(self, batch: str) -> str:
        return self._redis.names.key("crashes", batch)

    def _known(self, key: str) -> dict[str, dict[str, Any]]:
        found = cast("dict[bytes, bytes]", self._redis.hgetall(key))
        return {began.decode(): json.loads(life) for began, life in found.items()}


def _facts(life: Mapping[str, Any]) -> Iterator[str]:
    yield str(life.get("how", "gone without a word"))
    if "step" in life:
        yield f"when last seen step {life['step']}, {life['rows']} rows, peak memory {life['peak_memory_mb']} MB"
