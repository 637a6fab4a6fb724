"""What `producer watch` tells at its port: queues, batches, workers and Redis at the moment of a scrape; whether it is
alive, and whether it can do its work.

`registry` is all there is to mount elsewhere. A scrape waits for Redis for a moment only, and one look at it serves all
scrapes of the next seconds: a monitoring that asks often costs no more than one that does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from contract import checkup, queues
from contract.errors import DllmError
from contract.jobs import PRIORITIES
from contract.ledger import Batch, Ledger
from contract.monitoring import Family, Monitor, family, registry_of
from contract.settings import ProducerSettings
from producer.watcher import Watcher

FRESH_S = 5.0
PATIENCE_S = 3.0
KEPT_S = 60.0
STUCK_S = 300.0
"""A turn of the watcher is a chunk of each batch and a scan; taking a file over to another disk is the longest part."""

Labelled = list[tuple[Sequence[str], float]]


@dataclass(frozen=True)
class Look:
    """What Redis said at one moment: values of each metric by their labels."""

    at: float
    values: dict[str, Labelled]


class Queues(Collector):
    """Redis and the disks, as metrics."""

    def __init__(self, ledger: Ledger, settings: ProducerSettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._guard = threading.Lock()
        self._last: Look | None = None
        self._looking: threading.Thread | None = None

    def collect(self) -> Iterable[Family]:
        """Called at each scrape, by the thread that answers it."""
        look = self._look()
        age = time.monotonic() - look.at if look else KEPT_S
        yield family("dllm_redis_up", [((), float(age < FRESH_S))])
        if look and age < KEPT_S:
            for name, values in look.values.items():
                yield family(name, values)
        yield from self._disks()

    def _look(self) -> Look | None:
        """The last look, or a new one where that is not fresh and Redis answers in time."""
        with self._guard:
            if self._last and time.monotonic() - self._last.at < FRESH_S:
                return self._last
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look_now, name="metrics-look", daemon=True)
                self._looking.start()
            looking = self._looking
        looking.join(PATIENCE_S)
        return self._last

    def _look_now(self) -> None:
        with contextlib.suppress(RedisError, DllmError, OSError):
            began = time.monotonic()
            self._last = Look(began, {**dict(self._redis()), **dict(self._batches())})

    def _redis(self) -> Iterator[tuple[str, Labelled]]:
        info = self._ledger.redis.info()
        yield "dllm_redis_memory_bytes", [((), float(info.get("used_memory", 0)))]
        yield "dllm_redis_memory_limit_bytes", [((), float(info.get("maxmemory", 0)))]
        yield "dllm_redis_persistence_ok", [((), float(checkup.persistence(info) is None))]

    def _batches(self) -> Iterator[tuple[str, Labelled]]:
        redis = self._ledger.redis
        batches = self._ledger.get_many(self._ledger.open_batches())
        by_model: dict[str, list[Batch]] = defaultdict(list, {self._settings.queue_model: []})
        for batch in batches:
            by_model[batch.spec.model].append(batch)
        alive = queues.workers(redis)
        now = self._ledger.now()
        depths = {model: queues.depths(redis, model) for model in by_model}
        yield (
            "dllm_queue_rows",
            [((model, priority), float(depths[model][priority])) for model in by_model for priority in PRIORITIES],
        )
        yield "dllm_workers", [((model,), float(sum(one.serves(model) for one in alive))) for model in by_model]
        yield "dllm_open_batches", [((model,), float(len(found))) for model, found in by_model.items()]
        yield "dllm_open_batch_rows", [one for model, found in by_model.items() for one in _rows(model, found)]
        yield (
            "dllm_oldest_batch_age_seconds",
            [
                ((model,), max((_age_s(batch, now) for batch in found), default=0.0))
                for model, found in by_model.items()
            ],
        )

    def _disks(self) -> Iterator[Family]:
        folders = self._settings.folders
        usage = {one.name: shutil.disk_usage(one) for one in (folders.outputs, folders.logs) if one.exists()}
        yield family("dllm_disk_free_bytes", [((name,), float(found.free)) for name, found in usage.items()])
        yield family("dllm_disk_size_bytes", [((name,), float(found.total)) for name, found in usage.items()])


def _rows(model: str, batches: Sequence[Batch]) -> Iterator[tuple[Sequence[str], float]]:
    counts = [batch.counts for batch in batches]
    yield (model, "outstanding"), float(sum(one.submitted - one.ended for one in counts))
    for state in ("done", "failed", "cancelled"):
        yield (model, state), float(sum(getattr(one, state) for one in counts))


def _age_s(batch: Batch, now: float) -> float:
    """How long ago a batch could have begun."""
    begins = batch.spec.hours.not_before if batch.spec.hours and batch.spec.hours.not_before else 0.0
    return max(0.0, now - max(batch.spec.created_at, begins))


def registry(ledger: Ledger, settings: ProducerSettings) -> CollectorRegistry:
    """All that the producer's side has to tell, for whoever serves it."""
    return registry_of(Queues(ledger, settings))


@dataclass(frozen=True)
class Health:
    """Whether a watching producer is alive, and can do its work."""

    watcher: Watcher
    stop: Callable[[], bool]

    def stuck(self) -> list[str]:
        """Why the process should be ended."""
        still_s = time.monotonic() - self.watcher.turned_at
        return [f"the watcher has made no turn for {still_s:.0f} s"] if still_s > STUCK_S else []

    def unready(self) -> list[str]:
        found = self.stuck()
        if self.watcher.rounds.outages:
            found.append("Redis does not answer")
        for folder in (self.watcher.settings.folders.claimed, self.watcher.settings.folders.segments):
            if not os.access(folder, os.W_OK):
                found.append(f"{folder} cannot be written")
        if self.stop():
            found.append("the producer is stopping")
        return found


def monitor(watcher: Watcher, stop: Callable[[], bool]) -> contextlib.AbstractContextManager[object]:
    """The port of `producer watch`, where its settings name one."""
    if watcher.settings.metrics_port is None:
        return contextlib.nullcontext()
    health = Health(watcher, stop)
    return Monitor(watcher.settings, registry(watcher.ledger, watcher.settings), health.stuck, health.unready)
