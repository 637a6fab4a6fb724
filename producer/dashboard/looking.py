"""What all pages are made from: connections, rules, and what is known for many viewers at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer import monitoring, report, review
from producer.dashboard.access import Access, Viewer
from producer.dashboard.caching import Cached
from producer.dashboard.retrying import Retrying
from producer.review import Review

HOUR_S = 3600
REVIEW_S = 5.0
STAND_S = 1.0
PATIENCE_S = 2.0
RECENT = 100
"""Batches whose models have their queues shown."""


class LogIn(Exception):
    """Nobody knows who asks."""


@dataclass(frozen=True)
class Standing:
    """Queues and workers at one moment."""

    queues: list[report.QueueReport]
    workers: list[report.WorkerReport]

    @property
    def models(self) -> list[str]:
        return sorted({queue.model for queue in self.queues})


@dataclass
class Dashboard:
    """Made once for each application."""

    settings: ProducerSettings
    ledger: Ledger
    access: Access
    hour: Cached[Review] = field(init=False)
    standing: Cached[Standing] = field(init=False)
    retrying: Retrying = field(init=False)
    registry: CollectorRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.hour = Cached(self._review, REVIEW_S, PATIENCE_S)
        self.standing = Cached(self._stand, STAND_S, PATIENCE_S * 5)
        self.registry = monitoring.registry(self.ledger, self.settings)
        self.retrying = Retrying(self.ledger, self.settings.folders)

    def stand(self) -> Standing:
        """Raises RedisError where Redis does not tell in time."""
        found = self.standing()
        if found is None:
            raise RedisError("no answer in time")
        return found

    def _review(self) -> Review:
        now = int(time.time()) + 1  # whole, so that an hour is sixty minutes and nothing more
        return review.review(self.settings.folders.logs, now - HOUR_S, now)

    def _stand(self) -> Standing:
        workers = report.workers(self.ledger)
        models = {self.settings.queue_model, *(one.model for one in workers if one.model)}
        models |= {batch.spec.model for batch in self.ledger.newest(RECENT)}
        return Standing(report.waiting(self.ledger, sorted(models)), workers)


def _here(request: Request) -> Dashboard:
    return cast(Dashboard, request.app.state.dashboard)


Here = Annotated[Dashboard, Depends(_here)]


def _viewing(request: Request, here: Here) -> Viewer:
    viewer = here.access.viewer(request)
    if viewer is None:
        raise LogIn
    if entry := getattr(request.state, "entry", None):  # of the service that the page is mounted in
        entry.caller = viewer.name
    return viewer


Viewing = Annotated[Viewer, Depends(_viewing)]
