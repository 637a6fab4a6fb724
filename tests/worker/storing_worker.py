"""A worker without a model over an object store, killed at a chosen moment. Arguments: the point, `before` or `after`.

Points: `segment`, the put of a segment; `mark`, the marking of its rows; a published file's name, its put; `close`,
the closing of the batch in the ledger.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import contract.ledger
from contract.ledger import Ledger
from contract.objects import FileStore, ObjectStore
from contract.server import open_redis
from contract.settings import WorkerSettings, read
from tests.conftest import completion_row
from worker import uploads
from worker.intake import Intake


def die_at(owner: type, name: str, when: str, means: Any = lambda *_: True) -> None:
    step = getattr(owner, name)

    def dying(*args: Any, **values: Any) -> Any:
        if when == "before" and means(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(*args, **values)
        if means(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def work(settings: WorkerSettings) -> None:
    """As the loop does: take, write, and end what has become durable."""
    redis = open_redis(settings)
    ledger = Ledger(redis)
    with Intake(redis, ledger, settings) as intake, uploads.opened(settings.folders, ledger, intake.name) as outputs:
        while ledger.open_batches():
            taken = intake.take(4)
            durable = outputs.write([(row.batch, completion_row(row.index), row) for row in taken])
            intake.finish([row for *_, row in durable])
            outputs.sealed_if_complete(row.batch for *_, row in durable)
            time.sleep(0.01)


if __name__ == "__main__":
    point, when = sys.argv[1:]
    uploads.LOAD_AGE_S = 0.02
    contract.ledger.LOCK_S = 1.0
    if point == "segment":
        die_at(ObjectStore, "put_segment", when)
    elif point == "mark":
        die_at(Intake, "finish", when, lambda intake, rows, *_: bool(rows))
    elif point == "close":
        die_at(Ledger, "close", when)
    else:
        die_at(FileStore, "_put_file", when, lambda store, file, path: path.endswith(f"/{point}"))
    work(read(WorkerSettings))
