"""Puts right what dead processes left behind.

Every worker puts back what others held, queues what is due and publishes what is complete. The audit, which looks
through whole queues and folders, is for one at a time: the leader, by a lock that runs out with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from redis.exceptions import LockError, ResponseError
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.worker_registration import clean_worker_registry

from contract import interactive, logs, sealing
from contract.auditing import Auditor, Finding
from contract.errors import DllmError
from contract.ledger import Ledger
from contract.names import Connection
from contract.queues import queues
from contract.ranges import by_batch
from contract.settings import WorkerSettings
from worker.lanes import Lane
from worker.scripts import REPAIR

CHUNK = 1_000
LEAD_SCANS = 3
LEAST_LEAD_S = 1.0
"""A leader that gives no sign for so many scans, or so long, is followed by another."""


class Reconciler:
    """Looks after the queues of one model. Each step is atomic, so any number of workers may do it at once."""

    def __init__(self, redis: Connection, ledger: Ledger, settings: WorkerSettings, name: str) -> None:
        self._redis = redis
        self._ledger = ledger
        self._settings = settings
        self._log = logs.get(worker=name)
        self._queues = queues(redis, settings.queue_model)
        self._repair_script = redis.register_script(REPAIR)
        self._auditor = Auditor(ledger, settings.folders)
        self._leadership = ledger.leadership(max(LEAST_LEAD_S, LEAD_SCANS * settings.scan_s))
        self._told: set[tuple[str, str]] = set()

    def run(self) -> None:
        """Put back what dead workers held, queue what is due, seal what is complete; the leader audits."""
        for queue in self._queues:
            try:
                self._repair(Lane.of(queue))
                clean_worker_registry(queue)
            except ResponseError:
                self._log.exception("upkeep_failed", queue=queue.name)
        sealing.seal_ready(self._ledger, self._settings.folders, self._settings.keep_segments_s)
        if self._leads():
            self._audit()

    def _leads(self) -> bool:
        if self._leadership.local.token is not None:
            with contextlib.suppress(LockError):
                return self._leadership.reacquire()
        return self._leadership.acquire()

    def _audit(self) -> None:
        findings = [found for found in self._auditor.look() if found.kind != "unsealed"]  # that was tried just now
        for finding in findings:
            if finding.repairable:
                self._put_right(finding)
            elif (finding.kind, finding.where) not in self._told:
                log = self._log.bind(kind=finding.kind, where=finding.where, what=finding.what)
                log.error("found_for_a_person", to_do=finding.remedy)
        self._told = {(finding.kind, finding.where) for finding in findings}

    def _put_right(self, finding: Finding) -> None:
        log = self._log.bind(kind=finding.kind, where=finding.where, what=finding.what)
        try:
            log.warning("found_and_repaired", done=self._auditor.repair(finding))
        except (OSError, DllmError, ResponseError) as error:
            log.error("repair_failed", reason=str(error))

    def _repair(self, lane: Lane) -> None:
        keys = [lane.waiting, lane.intermediate, lane.started, lane.scheduled, lane.seen]
        patterns = [
            Job.key_for("%s"),
            Execution("%s", "%s", self._redis).key,
            ExecutionRegistry("%s", self._redis).key,
        ]
        while True:
            found = self._repair_script(keys=keys, args=[self._settings.lease_s, CHUNK, *patterns])
            due, expired, returned, stranded = found
            if returned or stranded:
                self._tell_put_back(lane, returned, stranded)
            if lane.interactive and (due or expired or stranded):
                interactive.ring(self._redis, self._settings.queue_model)
            if max(due, expired) < CHUNK:
                return

    def _tell_put_back(self, lane: Lane, returned: Sequence[bytes], stranded: Sequence[bytes]) -> None:
        ids = [job_id.decode(errors="replace").rpartition("-") for job_id in (*returned, *stranded)]
        ours = [(batch, int(index)) for batch, _, index in ids if index.isdecimal()]
        count = {"rows": len(ids), "of_dead_workers": len(returned), "stranded": len(stranded)}
        self._log.warning("rows_put_back", queue=lane.name, indices=by_batch(ours), **count)
