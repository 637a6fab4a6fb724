"""Where a prompt's answer becomes durable when outputs go to an object store, beside `worker/outputs.py`.

Rows are collected by batch for a moment and put as one object each; a row is given back by `write` once the put has
returned, and only then may its job be finished. Until then its lease is renewed like that of a row that runs. Threads
of their own upload and publish, so that the loop never waits for the store; when the store is slow or refuses, `full`
stops the taking, as a full disk does. Whatever has not been put when the process ends runs again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from contract import logs, segments, stores
from contract.ledger import Ledger
from contract.objects import ObjectStore, segment_name
from contract.paths import Folders
from worker.outputs import Outputs, Places, seal

LOAD_ROWS = 64
LOAD_BYTES = 8 << 20
LOAD_AGE_S = 1.0
"""An object is put when it has so many rows or bytes, or its first row is so old."""
MOST_ROWS = 16 * LOAD_ROWS
MOST_BYTES = 8 * LOAD_BYTES
"""When so much is not put yet, nothing more is taken."""
UPLOADS = 4
"""Puts at a time: of different batches, or one after the other of the same where the store is slow to answer."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CLOSE_S = 1.0

R = TypeVar("R", bound=tuple[Any, ...])


def opened(folders: Folders, ledger: Ledger, worker_name: str) -> Outputs | Uploads:
    """The way out for one worker's rows: chosen once, by where outputs go."""
    store = stores.of(folders)
    if isinstance(store, ObjectStore):
        return Uploads(store, folders, ledger, worker_name)
    return Outputs(folders, ledger, worker_name)


@dataclass
class Load:
    """Rows of a batch on their way: one object, under one name however often it is tried."""

    batch: str
    name: str
    since: float
    rows: list[Any] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, row: Any, line: bytes) -> None:
        self.rows.append(row)
        self.lines.append(line)
        self.size += len(line)

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= LOAD_ROWS or self.size >= LOAD_BYTES


class Uploads:
    """One worker's rows on their way to the store; what `Outputs` is for a folder. `write` is for the loop's thread."""

    def __init__(self, store: ObjectStore, folders: Folders, ledger: Ledger, worker_name: str) -> None:
        self._store = store
        self._folders = folders
        self._ledger = ledger
        self._worker_name = worker_name
        self._places = Places(folders, ledger)
        self._log = logs.get(worker=worker_name)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._collecting: OrderedDict[str, Load] = OrderedDict()
        """The load of each batch that still takes rows, the oldest first."""
        self._ready: deque[Load] = deque()
        self._under_way: dict[str, Load] = {}
        self._refused: set[str] = set()
        """Loads whose last put failed."""
        self._durable: list[Any] = []
        self._complete: OrderedDict[str, None] = OrderedDict()
        """Batches to publish if they are complete."""
        self._publishing = False
        work = [self._upload] * UPLOADS + [self._publish]
        self._threads = [threading.Thread(target=target, name=target.__name__, daemon=True) for target in work]
        for thread in self._threads:
            thread.start()

    # For the loop

    def write(self, rows: Sequence[R]) -> list[R]:
        """Take (batch, row, …) tuples to be put; returns those, of all calls so far, that have become durable since.

        Raises OSError when a batch's rows do not belong here: then write all of them again later.
        """
        lines = [segments.line(row[1]) for row in rows]
        for batch in {row[0] for row in rows}:
            self._places.check(batch)
        with self._changed:
            for row, line in zip(rows, lines, strict=True):
                self._collect(row, line)
            durable, self._durable = self._durable, []
        return durable

    def sealed_if_complete(self, batches: Iterable[str]) -> list[str]:
        """Have those of `batches` published that are complete; not waited for, so it returns none."""
        if asked := dict.fromkeys(batches):
            with self._changed:
                self._complete.update(asked)
                self._changed.notify_all()
        return []

    @property
    def pending(self) -> bool:
        """Is anything on its way, or durable and not given back by `write`, or being published?"""
        with self._changed:
            return bool(self._durable or self._loads() or self._complete or self._publishing)

    @property
    def full(self) -> bool:
        """Does the store refuse, or lag so far behind, that nothing more is to be taken?"""
        with self._changed:
            loads = self._loads()
            waiting = sum(len(load.rows) for load in loads), sum(load.size for load in loads)
            return bool(self._refused) or waiting[0] >= MOST_ROWS or waiting[1] >= MOST_BYTES

    def left(self) -> list[Any]:
        """What was written and has not been given back."""
        with self._changed:
            return [*self._durable, *(row for load in self._loads() for row in load.rows)]

    def wait(self, seconds: float) -> None:
        """Until something has become durable, or so long."""
        with self._changed:
            if not self._durable:
                self._changed.wait(seconds)

    def close(self) -> None:
        """End the threads. What has not been put is dropped: nobody was told that it is durable."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Collecting; the caller holds the lock

    def _collect(self, row: Any, line: bytes) -> None:
        batch = row[0]
        if batch not in self._collecting:
            self._collecting[batch] = Load(batch, segment_name(self._worker_name), time.monotonic())
            self._changed.notify_all()  # for its time
        load = self._collecting[batch]
        load.add(row, line)
        if load.is_full:
            self._ready.append(self._collecting.pop(batch))
            self._changed.notify_all()

    def _loads(self) -> list[Load]:
        return [*self._collecting.values(), *self._ready, *self._under_way.values()]

    def _next_load(self) -> Load | None:
        """The load to put now, if there is one; it is under way then."""
        if self._ready:
            load = self._ready.popleft()
        elif self._until_due() == 0.0:
            load = self._collecting.popitem(last=False)[1]
        else:
            return None
        self._under_way[load.name] = load
        return load

    def _until_due(self) -> float | None:
        """Seconds until the oldest load is put though it is not full; None when there is none."""
        oldest = next(iter(self._collecting.values()), None)
        return None if oldest is None else max(0.0, oldest.since + LOAD_AGE_S - time.monotonic())

    # The threads

    def _upload(self) -> None:
        while (load := self._awaited(self._next_load, self._until_due)) is not None:
            if not self._put(load):
                return
            with self._changed:
                del self._under_way[load.name]
                self._durable += load.rows
                self._changed.notify_all()

    def _awaited(self, found: Callable[[], Any], until: Callable[[], float | None] = lambda: None) -> Any:
        """What `found` gives, as soon as it gives something; None when it is time to end."""
        with self._changed:
            while not self._closed.is_set():
                if (item := found()) is not None:
                    return item
                self._changed.wait(until())
        return None

    def _put(self, load: Load) -> bool:
        """Put it, however often it takes; False when it is time to end before."""
        data, pause = b"".join(load.lines), FIRST_PAUSE_S
        while True:
            try:
                self._store.put_segment(load.batch, load.name, data)
            except Exception as error:  # noqa: BLE001 - rows must not be stuck here, whatever it is
                wait_s = random.uniform(0.5, 1.0) * pause
                self._log.error(
                    "outputs_not_put",
                    batch=load.batch,
                    rows=len(load.rows),
                    again_in_s=round(wait_s, 1),
                    reason=str(error),
                )
                self._note(load, refused=True)
                if self._closed.wait(wait_s):
                    return False
                pause = min(LONGEST_PAUSE_S, 2.0 * pause)
                continue
            self._note(load, refused=False)
            return True

    def _note(self, load: Load, refused: bool) -> None:
        with self._changed:
            (self._refused.add if refused else self._refused.discard)(load.name)

    def _publish(self) -> None:
        while (batch := self._awaited(self._next_batch)) is not None:
            try:
                seal(batch, self._ledger, self._folders)
            except Exception:  # noqa: BLE001 - the next batch is to be published all the same
                self._log.exception("publishing_failed", batch=batch)
            with self._changed:
                self._publishing = False
                self._changed.notify_all()

    def _next_batch(self) -> str | None:
        if not self._complete:
            return None
        self._publishing = True
        return self._complete.popitem(last=False)[0]
