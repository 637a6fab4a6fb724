"""The watching producer: claims what is ready in `batch_inputs/` and submits it, for as long as it runs.

First stage of a prompt's life; `producer.claims`, `producer.submitter` and `contract.sealing` do the work. Events only
wake it, the periodic scan is the truth. All open batches advance in turn, a chunk each, so that a long one does not
keep a short one waiting, and waiting for room keeps neither files from being claimed nor other batches from their turn.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from contract import audit, logs, sealing
from contract.errors import UsageError
from contract.ledger import LOCK_S, BatchSpec, Ledger
from contract.settings import ProducerSettings
from producer.claims import Claims, Look
from producer.hints import Hints
from producer.inbox import Inbox
from producer.notices import Notices
from producer.submitter import OUTAGES, Progress, Submission, pause_after, wait

ACTIVE = 16
"""Batches submitted in turn; each holds an open file and its list of ids. The rest wait until one ends or is full."""
LEAST_SCAN_S = 0.2
"""However many events come in, scans are this far apart."""
FULL_S = 0.1
SLICE_S = 0.2
"""A stop is noticed after this long: a signal handler cannot wake the main thread without a risk of deadlock."""


class Watcher:
    """Everything one `producer watch` knows between two turns. `stop` is asked often and ends it between chunks."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, stop: Callable[[], bool]) -> None:
        self.settings = settings
        self.ledger = ledger
        self.stop = stop
        self.claims = Claims(settings, ledger, audit.WATCH)
        self._wake = threading.Event()
        self._inbox = Inbox(settings.folders.inputs, settings.settle_s, settings.recursive)
        self._hints = Hints(settings.folders.inputs, self._wake, settings.recursive)
        self._notices = Notices()
        self._active: dict[str, Submission] = {}
        self._waiting: deque[BatchSpec] = deque()
        self._last_scan = float("-inf")
        self.outages = 0
        """Times in a row that Redis did not answer."""
        self.turned_at = time.monotonic()
        """When the last turn began, on the monotonic clock; endless while it publishes, which takes what it takes."""

    def run(self) -> None:
        """Watch until told to stop."""
        try:
            while not self.stop():
                self.turned_at = time.monotonic()
                busy = self._patiently(self._turn)
                if not busy:
                    self._sleep()
        finally:
            self._close()

    def run_once(self) -> None:
        """Claim and submit what is ready now, files that need to settle included, and return."""
        try:
            self._inbox.look()
            wait(self.settings.settle_s if self._inbox.unsettled else 0.0, self.stop)
            advanced: bool | None = None
            while not self.stop() and (advanced is None or self._active or self._waiting):
                # An outage has dropped what was under way: another scan finds it.
                advanced = self._patiently(self._scan if advanced is None else self._submit)
                if advanced is False:
                    wait(FULL_S, self.stop)
            self._patiently(self._tell_what_is_left)
        finally:
            self._close()

    def _tell_what_is_left(self) -> bool:
        """A killed producer's batches are taken over only when its locks have run out."""
        for spec in self.claims.pending():
            reason = (
                "stopped" if self.stop() else f"another producer has it, or was killed less than {LOCK_S:.0f} s ago"
            )
            logs.get(batch=spec.batch).warning("not_submitted_to_its_end", file=spec.source, reason=reason)
        return True

    def _turn(self) -> bool:
        """One scan if it is due, one chunk of each batch. True when there is more to do at once."""
        since = time.monotonic() - self._last_scan
        if since >= self._scan_s() or (self._wake.is_set() and since >= LEAST_SCAN_S):
            self._hints.check()
            self._scan_whatever_fails()
        return self._submit()

    def _scan_whatever_fails(self) -> None:
        """A full disk or a folder without permission does not end the watching."""
        try:
            self._scan()
            self._notices.clear("scan")
        except OSError as error:
            self._notices.warn("scan", "scan_failed", reason=str(error))

    def _scan_s(self) -> float:
        """Files that are settling are looked at as soon as they may be ready."""
        settled_s = max(self.settings.settle_s, LEAST_SCAN_S)
        return min(self.settings.scan_s, settled_s) if self._inbox.unsettled else self.settings.scan_s

    def _scan(self) -> bool:
        self._last_scan = time.monotonic()
        self._wake.clear()
        self.settings.folders.create()
        for file, look in self._inbox.look():
            self._claim(file, look)
        self._line_up(self.claims.pending())
        self.turned_at = math.inf
        sealing.seal_ready(self.ledger, self.settings.folders)
        self.turned_at = time.monotonic()
        return True

    def _claim(self, file: Path, look: Look) -> None:
        try:
            below = file.parent.relative_to(self.settings.folders.inputs)
            if self.claims.take(file, look, below=below) is not None:
                self._inbox.taken(file)
            self._notices.clear(str(file))
        except UsageError as error:
            self._notices.warn(str(file), "file_not_claimed", file=file.name, reason=str(error))
        except OSError as error:
            self._notices.warn(str(file), "file_not_claimed", file=file.name, reason=error.strerror)

    def _line_up(self, pending: Sequence[BatchSpec]) -> None:
        """New batches, the oldest first, wait before those that had their turn."""
        new = {spec.batch: spec for spec in pending if spec.batch not in self._active}
        waited = [new.pop(spec.batch) for spec in self._waiting if spec.batch in new]
        self._waiting = deque([*new.values(), *waited])

    def _activate(self) -> None:
        """Give waiting batches the places that are free."""
        while self._waiting and len(self._active) < ACTIVE:
            spec = self._waiting.popleft()
            self._active[spec.batch] = Submission(spec, self.ledger, self.settings, self.stop)

    def _submit(self) -> bool:
        """One chunk of each active batch; False when all of them wait for room.

        While others wait for a place, batches without room make way, as many as there are.
        """
        self._activate()
        advanced, others = False, len(self._waiting)
        for batch, submission in list(self._active.items()):
            if self.stop():
                break
            progress = self._step(submission)
            advanced |= progress is Progress.ADVANCED
            if progress in (None, Progress.FINISHED, Progress.LET_GO):
                del self._active[batch]
                advanced |= bool(self._waiting)
            elif progress is Progress.FULL and others > 0:
                others -= 1
                submission.close()
                del self._active[batch]
                self._waiting.append(submission.spec)
        return advanced

    def _step(self, submission: Submission) -> Progress | None:
        """None when the batch's files cannot be read or written now; the next scan tries again."""
        batch = submission.spec.batch
        try:
            progress = submission.step()
            self._notices.clear(batch)
            return progress
        except OSError as error:
            submission.close()
            self._notices.warn(batch, "submitting_interrupted", batch=batch, reason=str(error))
            return None

    def _patiently(self, work: Callable[[], bool]) -> bool | None:
        """Do `work`; after an outage of Redis drop what was under way, wait, and say None."""
        try:
            done = work()
            self.outages = 0
            return done
        except OUTAGES as error:
            self.outages += 1
            self._drop()
            wait(pause_after(self.outages, error), self.stop)
            return None

    def _sleep(self) -> None:
        """Until a scan is due, an event comes, or a batch that waits for room is to be asked again."""
        due = self._last_scan + (self._scan_s() if not self._wake.is_set() else LEAST_SCAN_S)
        end = min(due, time.monotonic() + FULL_S) if self._active or self._waiting else due
        while (left := end - time.monotonic()) > 0 and not self.stop():
            if self._wake.wait(min(left, SLICE_S)):
                wait(self._last_scan + LEAST_SCAN_S - time.monotonic(), self.stop)
                return

    def _drop(self) -> None:
        for submission in self._active.values():
            submission.close()
        self._active.clear()
        self._waiting.clear()

    def _close(self) -> None:
        self._drop()
        self._hints.close()
