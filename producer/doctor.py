"""What `producer doctor` looks at: this machine, the server, who works, and everything that `contract.auditing` finds.

Yields what is wrong as it is found and repairs what it may. Prints nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from redis.exceptions import ResponseError

from contract import checkup, queues, server, stores
from contract.addresses import shown
from contract.auditing import CONFIRM_S, Auditor, Finding
from contract.errors import DllmError, ServerError
from contract.hours import closed_until
from contract.ledger import Batch, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings

OVERDUE_S = 60.0
"""A lease that ran out so long ago should have been seen by some worker's upkeep."""
OLD_S = 86_400.0
STALLED_S = 1_800.0
"""With workers alive, some prompt should have ended within this time."""


class Diagnosis(BaseModel):
    """One thing that is wrong: where, what, and the remedy: what --fix does, or a person must do if it cannot.

    `done` is what --fix did, `refused` why it could not. A `note` is worth knowing, and nothing that is ill.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    where: str
    what: str
    remedy: str
    note: bool = False
    fixable: bool = False
    done: str | None = None
    refused: str | None = None


def examine(settings: ProducerSettings, fix: bool) -> Iterator[Diagnosis]:
    """Everything that is wrong now; with `fix` it is repaired where that is safe."""
    folders = settings.folders
    broken = list(_folders(folders))
    yield from broken
    yield from _disk(folders)
    yield from _store(folders)
    try:
        ledger = Ledger(server.open_redis(settings))
    except (ServerError, OSError) as error:
        where = shown(settings.redis_url) if settings.redis_url else str(folders.redis)
        yield Diagnosis(kind="server", where=where, what=str(error), remedy="do as it says")
        return
    yield from _server(ledger)
    yield from _workers(ledger)
    yield from _dead(ledger)
    if not broken:
        yield from _audit(ledger, folders, fix)


def _folders(folders: Folders) -> Iterator[Diagnosis]:
    try:
        folders.create()
    except OSError as error:
        where = str(error.filename or folders.root)
        yield Diagnosis(kind="folder", where=where, what=f"cannot be made: {error.strerror}", remedy="make it a folder")
        return
    for folder in (folders.inputs, folders.claimed, folders.outputs, folders.segments, folders.processed, folders.logs):
        if not os.access(folder, os.W_OK | os.X_OK):
            yield Diagnosis(
                kind="folder", where=str(folder), what="cannot be written", remedy="change its owner or mode"
            )


def _disk(folders: Folders) -> Iterator[Diagnosis]:
    """Each disk under the root once."""
    seen = set()
    for folder in filter(
        Path.exists, (folders.root, folders.inputs, folders.outputs, folders.processed, folders.redis)
    ):
        device = folder.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        yield from _trouble("disk", str(folder), checkup.disk(folder))


def _store(folders: Folders) -> Iterator[Diagnosis]:
    """Can an object store for outputs be used? A small object is put, read and deleted."""
    if folders.outputs_url is None:
        return
    try:
        stores.of(folders).check()
    except DllmError as error:
        remedy = "see to the network, and to what its package is told of keys and permissions"
        yield Diagnosis(kind="store", where=folders.outputs_url, what=str(error), remedy=remedy)


def _server(ledger: Ledger) -> Iterator[Diagnosis]:
    """Its clock, its disk, its memory. One that does not let us ask is not asked."""
    asked_at = time.time()
    yield from _trouble("clock", "server", checkup.clock(ledger.now(), asked_at))
    with contextlib.suppress(ResponseError):
        info = ledger.redis.info()
        yield from _trouble("persistence", "server", checkup.persistence(info))
        yield from _trouble("memory", "server", checkup.memory(info))


def _trouble(kind: str, where: str, found: checkup.Trouble | None) -> Iterator[Diagnosis]:
    if found is not None:
        yield Diagnosis(kind=kind, where=where, what=found.what, remedy=found.remedy, note=found.note)


def _workers(ledger: Ledger) -> Iterator[Diagnosis]:
    """Models for which prompts wait and nobody works, or nobody gets anything done."""
    alive, now = queues.workers(ledger.redis), ledger.now()
    batches = ledger.get_many(ledger.open_batches())
    for model in sorted({batch.spec.model for batch in batches}):
        mine = [batch for batch in batches if batch.spec.model == model and batch.counts.submitted > batch.counts.ended]
        rows = sum(batch.counts.submitted - batch.counts.ended for batch in mine)
        served = any(worker.serves(model) for worker in alive)
        if rows and not served:
            what = f"{rows} rows have not ended, and no worker is alive"
            yield Diagnosis(kind="no_worker", where=model, what=what, remedy=f"start `worker run --model {model}`")
        elif rows and (still_s := now - _last_sign(mine, ledger)) > STALLED_S:
            what = f"workers are alive, and of {rows} rows none has ended for {still_s / 60:.0f} minutes"
            yield Diagnosis(kind="stalled", where=model, what=what, remedy="read the workers' logs")
        if overdue := queues.overdue(ledger.redis, model, now, OVERDUE_S):
            what = f"{overdue} leases ran out more than a minute ago, and nobody took the rows back"
            remedy = f"start `worker run --model {model}`: its upkeep does" if not served else "read the workers' logs"
            yield Diagnosis(kind="stuck_leases", where=model, what=what, remedy=remedy)
        yield from _old(mine, now)


def _last_sign(batches: Sequence[Batch], ledger: Ledger) -> float:
    """When a row of one of them last ended or could have begun; now while all of them wait for their hours."""
    running = [
        batch for batch in batches if not batch.spec.hours or not closed_until(ledger.redis, [batch.spec.hours])[0]
    ]
    signs = [max(batch.spec.created_at, batch.started_at or 0.0, batch.ended_at or 0.0) for batch in running]
    return max(signs, default=ledger.now())


def _old(batches: Sequence[Batch], now: float) -> Iterator[Diagnosis]:
    for batch in batches:
        counts, age_s = batch.counts, now - batch.spec.created_at
        if age_s > OLD_S and not batch.spec.hours:
            what = f"{counts.submitted - counts.ended} rows have not ended after {age_s / OLD_S:.1f} days"
            remedy = "`producer report` says how fast they go, `producer cancel` ends them"
            yield Diagnosis(kind="old_batch", where=batch.spec.batch, what=what, remedy=remedy, note=True)


def _dead(ledger: Ledger) -> Iterator[Diagnosis]:
    for worker, how in queues.dead(ledger.redis).items():
        remedy = f"its rows run again; logs/worker-{worker}.jsonl may say why"
        yield Diagnosis(kind="dead_worker", where=worker, what=f"it died: {how}", remedy=remedy, note=True)


def _audit(ledger: Ledger, folders: Folders, fix: bool) -> Iterator[Diagnosis]:
    """What stands in no place is looked at twice: it may have been on its way from one to another."""
    auditor = Auditor(ledger, folders)
    findings = auditor.look(thorough=True)
    if auditor.unsure:
        time.sleep(CONFIRM_S)
        findings = auditor.look(thorough=True)
    for finding in findings:
        yield _repaired(finding, auditor) if fix and finding.repairable else _diagnosis(finding)


def _repaired(finding: Finding, auditor: Auditor) -> Diagnosis:
    try:
        return _diagnosis(finding).model_copy(update={"done": auditor.repair(finding)})
    except (OSError, DllmError) as error:
        return _diagnosis(finding).model_copy(update={"refused": str(error)})


def _diagnosis(finding: Finding) -> Diagnosis:
    return Diagnosis(
        kind=finding.kind,
        where=finding.where,
        what=finding.what,
        remedy=finding.remedy,
        fixable=finding.repairable,
    )
