"""Where a prompt's answer becomes durable: rows go to this worker's segments, and complete batches are sealed.

A row is on the disk when `write` returns; only then may its job be finished.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType

from redis.exceptions import RedisError

from contract import logs, sealing
from contract.errors import DllmError
from contract.jobs import Row
from contract.ledger import Ledger
from contract.paths import Folders
from contract.segments import SegmentWriter

OPEN_BATCHES = 32


class Outputs:
    """One worker's segments, a file per batch; the least recently written are closed when there are too many."""

    def __init__(self, folders: Folders, ledger: Ledger, worker_name: str) -> None:
        self._folders = folders
        self._ledger = ledger
        self._worker_name = worker_name
        self._writers: OrderedDict[str, SegmentWriter] = OrderedDict()

    def write(self, rows: Sequence[tuple[str, Row]]) -> None:
        """Put (batch, row) pairs on the disk, with one fsync per batch.

        Raises OSError (a full disk, say): then write all of them again later; a row written twice is published once.
        """
        by_batch: dict[str, list[Row]] = {}
        for batch, row in rows:
            by_batch.setdefault(batch, []).append(row)
        for batch, batch_rows in by_batch.items():
            self._writer(batch).append(batch_rows)

    def sealed_if_complete(self, batches: Iterable[str]) -> list[str]:
        """Publish those of `batches` that are complete; returns them.

        What goes wrong here is logged, not raised: every worker's and producer's maintenance tries again.
        """
        sealed = []
        for batch in sorted(set(batches)):
            try:
                if sealing.seal(batch, self._ledger, self._folders):
                    sealed.append(batch)
                    self._close(batch)
            except (OSError, RedisError, DllmError, ValueError) as error:
                logs.get(batch=batch).error("publishing_failed", reason=str(error))
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
            self._writers[batch] = SegmentWriter(self._folders, batch, self._worker_name)
        self._writers.move_to_end(batch)
        return self._writers[batch]

    def _close(self, batch: str) -> None:
        if writer := self._writers.pop(batch, None):
            writer.close()
