"""One of a model's queues, by its keys: RQ's, and ours."""

from __future__ import annotations

from dataclasses import dataclass

from rq import Queue

from contract.names import Names


@dataclass(frozen=True)
class Lane:
    """A queue of the model. `turns` and `hours` are `contract.turns`', `seen` the reconciler's, the others RQ's."""

    name: str
    waiting: str
    intermediate: str
    started: str
    scheduled: str
    failed: str
    turns: str
    hours: str
    seen: str
    """Since when ids stand in `intermediate`, by the looks of REPAIR."""

    @classmethod
    def of(cls, queue: Queue) -> Lane:
        names: Names = queue.connection.names
        return cls(
            name=queue.name,
            waiting=queue.key,
            intermediate=queue.intermediate_queue.key,
            started=queue.started_job_registry.key,
            scheduled=queue.scheduled_job_registry.key,
            failed=queue.failed_job_registry.key,
            turns=names.turns(queue.name),
            hours=names.hours(queue.name),
            seen=names.key("intermediate", queue.name),
        )

    @property
    def taking(self) -> tuple[str, ...]:
        """The keys that the scripts TAKE and EMPTY ask for, in their order."""
        return (self.waiting, self.intermediate, self.started, self.scheduled, self.turns, self.hours)
