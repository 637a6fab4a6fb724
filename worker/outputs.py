"""Where a prompt's answer becomes durable: rows go to this worker's segments, and complete batches are sealed.

A row that `write` returns is durable; only then may its job be finished. In a folder (`Outputs`) that is at once; an
object store (`worker/uploads.py`) takes rows as whole objects and its time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from redis.exceptions import RedisError

from contract import logs, sealing, stores
from contract.errors import DllmError, StoreError
from contract.jobs import Row
from contract.ledger import Ledger
from contract.paths import Folders
from contract.segments import SegmentWriter

OPEN_BATCHES = 32
CHECKED_BATCHES = 10_000

R = TypeVar("R", bound=tuple[Any, ...])


def seal(batch: str, ledger: Ledger, folders: Folders) -> bool:
    """Publish the batch if it is complete; True when this call did.

    What goes wrong here is logged, not raised: every worker's and producer's maintenance tries again.
    """
    try:
        return sealing.seal(batch, ledger, folders)
    except (OSError, RedisError, DllmError, ValueError) as error:
        logs.get(batch=batch).error("publishing_failed", reason=str(error))
        return False


class Places:
    """Do a batch's rows belong where this worker writes? Others would not find them elsewhere. Asked once a batch."""

    def __init__(self, folders: Folders, ledger: Ledger) -> None:
        self._folders = folders
        self._ledger = ledger
        self._right: set[str] = set()

    def check(self, batch: str) -> None:
        """Raises StoreError when they do not, or when nobody can be asked now."""
        if batch in self._right:
            return
        try:
            record = self._ledger.get(batch)
        except RedisError as error:
            raise StoreError(f"where batch '{batch}' has its rows is not known now ({error})") from error
        if record is None:
            return
        stores.of(self._folders, record.spec)
        if len(self._right) >= CHECKED_BATCHES:
            self._right.clear()
        self._right.add(batch)


class Outputs:
    """One worker's segments, a file per batch; the least recently written are closed when there are too many."""

    def __init__(self, folders: Folders, ledger: Ledger, worker_name: str) -> None:
        self._folders = folders
        self._ledger = ledger
        self._worker_name = worker_name
        self._places = Places(folders, ledger)
        self._writers: OrderedDict[str, SegmentWriter] = OrderedDict()

    def write(self, rows: Sequence[R]) -> Sequence[R]:
        """Put (batch, row, …) tuples on the disk, with one fsync per batch; returns them, since they are durable then.

        Raises OSError (a full disk, say): then write all of them again later; a row written twice is published once.
        """
        by_batch: dict[str, list[Row]] = {}
        for batch, row, *_ in rows:
            by_batch.setdefault(batch, []).append(row)
        for batch, batch_rows in by_batch.items():
            self._writer(batch).append(batch_rows)
        return rows

    pending = False
    """Rows are durable, and batches published, when the calls return: here nothing is ever on its way …"""
    full = False
    """… and a full disk says so when it is written to."""

    def left(self) -> list[Any]:
        """What was written and not returned: nothing, as above."""
        return []

    def wait(self, seconds: float) -> None:
        """For what is on its way."""

    def sealed_if_complete(self, batches: Iterable[str]) -> list[str]:
        """Publish those of `batches` that are complete; returns them."""
        sealed = [batch for batch in sorted(set(batches)) if seal(batch, self._ledger, self._folders)]
        for batch in sealed:
            self._close(batch)
        return sealed

    def close(self) -> None:
        for batch in list(self._writers):
            self._close(batch)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self, batch: str) -> SegmentWriter:
        if batch not in self._writers:
            while len(self._writers) >= OPEN_BATCHES:
                self._close(next(iter(self._writers)))
            self._places.check(batch)
            self._writers[batch] = SegmentWriter(self._folders, batch, self._worker_name)
        self._writers.move_to_end(batch)
        return self._writers[batch]

    def _close(self, batch: str) -> None:
        if writer := self._writers.pop(batch, None):
            writer.close()
