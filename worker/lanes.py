"""One of a model's queues, by its keys: RQ's, and those of its batches' turns."""

from __future__ import annotations

from dataclasses import dataclass

from rq import Queue

from contract import turns


@dataclass(frozen=True)
class Lane:
    """One of the model's queues. `turns` and `hours` are `contract.turns`', the others have RQ's names."""

    name: str
    waiting: str
    intermediate: str
    started: str
    scheduled: str
    failed: str
    turns: str
    hours: str

    @classmethod
    def of(cls, queue: Queue) -> Lane:
        return cls(
            name=queue.name,
            waiting=queue.key,
            intermediate=queue.intermediate_queue.key,
            started=queue.started_job_registry.key,
            scheduled=queue.scheduled_job_registry.key,
            failed=queue.failed_job_registry.key,
            turns=turns.turns(queue.name),
            hours=turns.hours(queue.name),
        )

    @property
    def taking(self) -> tuple[str, ...]:
        """The keys that the scripts TAKE and EMPTY ask for, in their order."""
        return (self.waiting, self.intermediate, self.started, self.scheduled, self.turns, self.hours)
