"""Puts right what dead processes left behind: every worker does it, and no lock could die with one of them."""

from __future__ import annotations

from redis import Redis
from redis.exceptions import ResponseError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.worker_registration import clean_worker_registry

from contract import logs, sealing
from contract.ledger import Ledger
from contract.queues import queues
from contract.settings import WorkerSettings
from worker.lanes import Lane
from worker.scripts import REPAIR

CHUNK = 1_000


class Reconciler:
    """Looks after the queues of one model. Each step is atomic, so any number of workers may do it at once."""

    def __init__(self, redis: Redis, ledger: Ledger, settings: WorkerSettings, name: str) -> None:
        self._redis = redis
        self._ledger = ledger
        self._settings = settings
        self._log = logs.get(worker=name)
        self._queues = queues(redis, settings.queue_model)
        self._repair_script = redis.register_script(REPAIR)

    def run(self) -> None:
        """Put back what dead workers held, queue what is due, seal what is complete."""
        for queue in self._queues:
            try:
                self._repair(Lane.of(queue))
                clean_worker_registry(queue)
            except ResponseError:
                self._log.exception("cannot look after the queue", queue=queue.name)
        sealing.seal_ready(self._ledger, self._settings.folders)

    def _repair(self, lane: Lane) -> None:
        keys = [lane.waiting, lane.intermediate, lane.started, lane.scheduled, f"dllm:intermediate:{lane.name}"]
        patterns = [
            Job.key_for("%s"),
            Execution("%s", "%s", self._redis).key,
            ExecutionRegistry("%s", self._redis).key,
        ]
        while True:
            found = self._repair_script(keys=keys, args=[self._settings.lease_s, CHUNK, *patterns])
            due, expired, stranded = found
            if expired or stranded:
                self._log.warning("put back jobs", queue=lane.name, of_dead_workers=expired, stranded=stranded)
            if max(due, expired) < CHUNK:
                return
