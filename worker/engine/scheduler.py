"""Who is in the next forward: rows in flight under a row and a position budget, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from worker.engine.memory import MemoryPlan
from worker.engine.request import Span
from worker.engine.sequence import Row, State


class Scheduler:
    """Waiting and running rows. Rows that denoise go first; what is left of the budget prefills."""

    def __init__(self, max_rows: int, max_step_tokens: int, memory: MemoryPlan) -> None:
        self.max_rows = max_rows
        self._memory = memory
        self.max_step_tokens = max_step_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.held: set[int] = set()
        """Keys of running rows that wait for another one's prefill."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, row: Row) -> None:
        self.waiting.append(row)

    def room(self) -> int:
        """Rows that could be added and run at once, memory permitting."""
        return max(0, self.max_rows - len(self))

    def admit(self) -> None:
        """Let waiting rows in while there is room for them and for all that they may come to hold."""
        held = sum(self._memory.need(row.most_positions) for row in self.running)
        while self.waiting and len(self.running) < self.max_rows:
            held += self._memory.need(self.waiting[0].most_positions)
            if held > self._memory.budget and self.running:
                return
            self.running.append(self.waiting.popleft())

    def step(self) -> list[tuple[Row, Span]]:
        """Choose this forward's rows and spans; never empty while there are running rows that are not held."""
        chosen: list[tuple[Row, Span]] = []
        left = self.max_step_tokens
        prefilling = [row for row in self.running if row.state is State.PREFILLING and row.key not in self.held]
        for row in self.running:
            if row.state is not State.PREFILLING and (row.next_length() <= left or not chosen):
                chosen.append((row, row.span(left)))
                left -= row.next_length()
        for row in prefilling:
            if row.context_block <= left or not chosen:
                span = row.span(left)
                chosen.append((row, span))
                left -= len(span.tokens)
        self._rotate({id(row) for row, _ in chosen})
        return chosen

    def remove(self, request_id: Hashable) -> Row | None:
        """Take a row out, running or waiting; None when it is not here."""
        for rows in (self.running, self.waiting):
            for row in rows:
                if row.request.id == request_id:
                    rows.remove(row)
                    return row
        return None

    def retire(self) -> list[Row]:
        """Take out the rows that are finished."""
        finished = [row for row in self.running if row.state is State.FINISHED]
        if finished:
            self.running = [row for row in self.running if row.state is not State.FINISHED]
        return finished

    def _rotate(self, chosen: set[int]) -> None:
        """Rows that the budget left out come first next time."""
        if len(chosen) < len(self.running):
            self.running.sort(key=lambda row: id(row) in chosen)
