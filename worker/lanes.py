"""One of a model's queues, by the names that RQ gives to its keys."""

from __future__ import annotations

from dataclasses import dataclass

from rq import Queue


@dataclass(frozen=True)
class Lane:
    """One of the model's queues, by the names that RQ gives to its keys."""

    name: str
    waiting: str
    intermediate: str
    started: str
    scheduled: str
    failed: str

    @classmethod
    def of(cls, queue: Queue) -> Lane:
        return cls(
            name=queue.name,
            waiting=queue.key,
            intermediate=queue.intermediate_queue.key,
            started=queue.started_job_registry.key,
            scheduled=queue.scheduled_job_registry.key,
            failed=queue.failed_job_registry.key,
        )
