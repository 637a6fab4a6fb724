"""Who is in the engine: rows that run, rows that wait to run, and how many there may be of each.

Knows nothing of forwards: `scheduler.py` and the engine of random canvases choose among the rows that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from worker.engine.request import Request


class Placed(Protocol):
    """What must be known of a row."""

    @property
    def request(self) -> Request: ...

    @property
    def most_positions(self) -> int: ...

    admitted_at: float


class Memory(Protocol):
    """Bytes for the keys and values of all running rows, and what a row of so many positions takes of them."""

    @property
    def budget(self) -> int: ...

    def need(self, positions: int) -> int: ...


R = TypeVar("R", bound=Placed)


class Places(Generic[R]):
    """Waiting and running rows, in order of arrival.

    Urgent rows wait before all others, and may use `urgent_rows` places that the others may not.
    """

    def __init__(self, max_rows: int, urgent_rows: int, memory: Memory) -> None:
        self.max_rows = max_rows
        self.urgent_rows = urgent_rows
        self.ceiling = max_rows + urgent_rows
        """Rows that memory has room for, as far as is known."""
        self._memory = memory
        self.waiting: deque[R] = deque()
        self.running: list[R] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, row: R, front: bool = False) -> None:
        """Let a row wait behind those of its urgency, or before them."""
        if front or row.request.urgent:
            urgent = sum(other.request.urgent for other in self.waiting)
            self.waiting.insert(urgent if front != row.request.urgent else 0, row)
        else:
            self.waiting.append(row)

    def room(self, urgent: bool = False) -> int:
        """Rows that could be added and run at once, memory permitting."""
        left = self.max_rows + self.urgent_rows - len(self)
        if not urgent:
            left = min(left, self.max_rows - sum(not row.request.urgent for row in (*self.waiting, *self.running)))
        return max(0, left)

    def admit(self) -> None:
        """Let waiting rows in while there is room for them and for all that they may come to hold."""
        if not self.waiting:
            return
        held = self._held()
        while self.waiting and self._fits(self.waiting[0], held):
            row = self.waiting.popleft()
            self.running.append(row)
            held += self._memory.need(row.most_positions)

    def in_the_way(self) -> Hashable | None:
        """Id of the youngest row that is not urgent, while it keeps an urgent one out."""
        if not self.waiting or not self.waiting[0].request.urgent or self._fits(self.waiting[0], self._held()):
            return None
        others = [row for row in self.running if not row.request.urgent]
        return max(others, key=lambda row: row.admitted_at).request.id if others else None

    def find(self, request_id: Hashable) -> R | None:
        """A running row by its id."""
        return next((row for row in self.running if row.request.id == request_id), None)

    def remove(self, request_id: Hashable) -> R | None:
        """Take a row out, running or waiting; None when it is not here."""
        for rows in (self.running, self.waiting):
            for row in rows:
                if row.request.id == request_id:
                    rows.remove(row)
                    return row
        return None

    def halve(self) -> list[R]:
        """Memory did not suffice: never again more than half of the rows that run now. Returns those to do without."""
        self.max_rows = self.ceiling = len(self.running) // 2
        return sorted(self.running, key=lambda row: not row.request.urgent)[self.ceiling :]

    def _held(self) -> int:
        """Bytes that the running rows may come to hold."""
        return sum(self._memory.need(row.most_positions) for row in self.running)

    def _fits(self, row: R, held: int) -> bool:
        """May it run beside those that run, which hold so much? One that is alone may whatever it needs."""
        if not self.running:
            return True
        if len(self.running) >= self.ceiling:
            return False
        if not row.request.urgent and sum(not other.request.urgent for other in self.running) >= self.max_rows:
            return False
        return held + self._memory.need(row.most_positions) <= self._memory.budget
