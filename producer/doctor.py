"""What `producer doctor` looks at: this machine, the server, who works, and everything that `contract.auditing` finds.

Yields what is wrong as it is found and repairs what it may. Prints nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from contract import queues, server
from contract.addresses import shown
from contract.auditing import CONFIRM_S, Auditor, Finding
from contract.errors import DllmError, ServerError
from contract.ledger import Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings

LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_SHARE = 0.02
LARGEST_SKEW_S = 5.0
"""Times in output rows and reports are those of different machines; leases are the server's alone."""


class Diagnosis(BaseModel):
    """One thing that is wrong: where, what, and the remedy: what --fix does, or a person must do if it cannot.

    `done` is what --fix did, `refused` why it could not.
    """

    model_config = ConfigDict(frozen=True)

    kind: str
    where: str
    what: str
    remedy: str
    fixable: bool = False
    done: str | None = None
    refused: str | None = None


def examine(settings: ProducerSettings, fix: bool) -> Iterator[Diagnosis]:
    """Everything that is wrong now; with `fix` it is repaired where that is safe."""
    folders = settings.folders
    broken = list(_folders(folders))
    yield from broken
    yield from _disk(folders)
    try:
        ledger = Ledger(server.open_redis(settings))
    except (ServerError, OSError) as error:
        where = shown(settings.redis_url) if settings.redis_url else str(folders.redis)
        yield Diagnosis(kind="server", where=where, what=str(error), remedy="do as it says")
        return
    yield from _clock(ledger)
    yield from _workers(ledger)
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
        usage = shutil.disk_usage(folder)
        if usage.free < max(LEAST_FREE_BYTES, LEAST_FREE_SHARE * usage.total):
            what = f"{usage.free >> 20} MB of {usage.total >> 20} are free"
            yield Diagnosis(kind="disk", where=str(folder), what=what, remedy="make room: workers stop when it is full")


def _clock(ledger: Ledger) -> Iterator[Diagnosis]:
    before = time.time()
    skew = ledger.now() - (before + time.time()) / 2
    if abs(skew) > LARGEST_SKEW_S:
        what = f"the server's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        yield Diagnosis(kind="clock", where="server", what=what, remedy="let both keep time by NTP")


def _workers(ledger: Ledger) -> Iterator[Diagnosis]:
    """Models for which prompts wait and no worker lives."""
    alive = queues.workers(ledger.redis)
    batches = ledger.get_many(ledger.open_batches())
    for model in sorted({batch.spec.model for batch in batches}):
        if any(worker.serves(model) for worker in alive):
            continue
        mine = [batch.counts for batch in batches if batch.spec.model == model]
        if rows := sum(counts.submitted - counts.ended for counts in mine):
            what = f"{rows} rows have not ended, and no worker is alive"
            yield Diagnosis(kind="no_worker", where=model, what=what, remedy=f"start `worker run --model {model}`")


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
