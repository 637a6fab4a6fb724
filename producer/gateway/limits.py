"""How much may be asked: requests a minute and at a time of a key, and rows of all keys beside what workers can run.

Counts are those of this process. A key's requests a minute come evenly: an idle one may send a minute's worth at once.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contract.interactive import Capacity
from producer.gateway.errors import too_many, unavailable

MINUTE_S = 60.0
LONGEST_RETRY_S = 60.0
OF_LATE = 0.1
"""Weight of the newest request in the mean time of one."""


@dataclass(frozen=True)
class Caller:
    """Whose key it was, and the limits that hold for it; 0 for none."""

    name: str
    requests_per_minute: int
    concurrent: int


@dataclass(frozen=True)
class Measured:
    """What a model's workers could do when it was last looked at, and how many of the rows were asked for from here."""

    capacity: Capacity
    own: int

    @property
    def others(self) -> int:
        """Rows of requests that other services asked for."""
        return max(0, self.capacity.running + self.capacity.waiting - self.own)


class Limits:
    """What runs at this moment, and what ran of late. `share` of the workers' rows may be taken by requests."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._requests: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._mean_s = 1.0

    def count(self, caller: Caller) -> None:
        """A request of `caller` came. Raises ApiError (429) when it has had its requests of this minute."""
        most = caller.requests_per_minute
        if not most:
            return
        now = self._clock()
        left, at = self._left.get(caller.name, (float(most), now))
        left = min(float(most), left + (now - at) * most / MINUTE_S)
        if left < 1:
            self._left[caller.name] = left, now
            wait = (1 - left) * MINUTE_S / most
            raise too_many(f"this key may send {most} requests a minute", wait)
        self._left[caller.name] = left - 1, now

    def rows(self, model: str) -> int:
        """Rows of `model` that are asked for at this moment."""
        return self._rows[model]

    @contextlib.contextmanager
    def running(self, caller: Caller, model: str, rows: int, measured: Measured) -> Iterator[None]:
        """While a request runs. Raises ApiError: 503 without a worker, 429 where key or workers have enough to do."""
        if not measured.capacity.workers:
            raise unavailable(f"no worker for model '{model}' is alive", "no_worker", 5.0)
        if caller.concurrent and self._requests[caller.name] >= caller.concurrent:
            raise too_many(f"this key may have {caller.concurrent} requests at a time", self._mean_s)
        most = max(1, math.floor(self._share * measured.capacity.rows))
        taken = self._rows[model] + measured.others
        if taken and taken + rows > most:
            wait = self._mean_s * (taken + rows - most) / most
            raise too_many("the workers have as much to do as they can: try again", min(LONGEST_RETRY_S, wait))
        began = self._clock()
        self._requests[caller.name] += 1
        self._rows[model] += rows
        try:
            yield
        finally:
            self._requests[caller.name] -= 1
            self._rows[model] -= rows
            self._mean_s += OF_LATE * (self._clock() - began - self._mean_s)
