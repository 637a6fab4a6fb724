"""Who is in the next forward: rows in flight under a row and a position budget, in order of arrival."""

from __future__ import annotations

from worker.engine.memory import MemoryPlan
from worker.engine.places import Places
from worker.engine.request import Span
from worker.engine.sequence import Row, State


class Scheduler(Places[Row]):
    """Waiting and running rows. Urgent ones go first; then those that denoise; what is left of the budget prefills."""

    def __init__(self, max_rows: int, max_step_tokens: int, memory: MemoryPlan, urgent_rows: int = 0) -> None:
        super().__init__(max_rows, urgent_rows, memory)
        self.max_step_tokens = max_step_tokens
        self.held: set[int] = set()
        """Keys of running rows that wait for another one's prefill."""

    def step(self) -> list[tuple[Row, Span]]:
        """Choose this forward's rows and spans; never empty while there are running rows that are not held."""
        chosen: list[tuple[Row, Span]] = []
        left = self.max_step_tokens
        for row in sorted(self.running, key=_turn):
            prefills = row.state is State.PREFILLING
            if prefills and row.key in self.held:
                continue
            if (row.context_block if prefills else row.next_length()) <= left or not chosen:
                span = row.span(left)
                chosen.append((row, span))
                left -= len(span.tokens)
        self._rotate({id(row) for row, _ in chosen})
        return chosen

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


def _turn(row: Row) -> tuple[bool, bool]:
    """Rows are sorted by it, and keep their order where it is the same."""
    return not row.request.urgent, row.state is State.PREFILLING
