"""The watching producer: claims what is ready in `batch_inputs/` and submits it, for as long as it runs.

First stage of a prompt's life; `producer.claims` and `producer.rounds` do the work. Events only wake it, the periodic
scan is the truth. Waiting for room keeps no files from being claimed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from contract import audit, logs
from contract.errors import UsageError
from contract.ledger import LOCK_S, Ledger
from contract.settings import ProducerSettings
from producer.claims import Claims, Look
from producer.hints import Hints
from producer.inbox import Inbox
from producer.notices import Notices
from producer.rounds import Rounds
from producer.submitter import wait

LEAST_SCAN_S = 0.2
"""However many events come in, scans are this far apart."""
CLAIMING_S = 1.0
"""Ten thousand files at once are claimed in stretches of this length, between which those claimed are submitted."""
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
        self.rounds = Rounds(settings, ledger, self.claims, stop)
        self._last_scan = float("-inf")
        self.turned_at = time.monotonic()
        """When the last turn began, on the monotonic clock; endless while it publishes, which takes what it takes."""

    def run(self) -> None:
        """Watch until told to stop."""
        try:
            while not self.stop():
                self.turned_at = time.monotonic()
                busy = self.rounds.patiently(self._turn)
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
            while not self.stop() and (advanced is None or self.rounds.busy):
                # An outage has dropped what was under way: another scan finds it.
                advanced = self.rounds.patiently(self._scan if advanced is None else self.rounds.advance)
                if advanced is False:
                    wait(FULL_S, self.stop)
            self.rounds.patiently(self._tell_what_is_left)
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
        return self.rounds.advance()

    def _scan_whatever_fails(self) -> None:
        """A full disk or a folder without permission does not end the watching."""
        try:
            self._scan(CLAIMING_S)
            self._notices.clear("scan")
        except OSError as error:
            self._notices.warn("scan", "scan_failed", reason=str(error))

    def _scan_s(self) -> float:
        """Files that are settling are looked at as soon as they may be ready."""
        settled_s = max(self.settings.settle_s, LEAST_SCAN_S)
        return min(self.settings.scan_s, settled_s) if self._inbox.unsettled else self.settings.scan_s

    def _scan(self, claiming_s: float = math.inf) -> bool:
        self._last_scan = time.monotonic()
        self._wake.clear()
        self.settings.folders.create()
        for file, look in self._inbox.look():
            self._claim(file, look)
            if self.stop() or time.monotonic() - self._last_scan > claiming_s:
                self._wake.set()  # for the rest
                break
        self.turned_at = math.inf
        self.rounds.look()
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
            self._notices.warn(str(file), "file_not_claimed", file=file.name, reason=error.strerror or str(error))

    def _sleep(self) -> None:
        """Until a scan is due, an event comes, or a batch that waits for room is to be asked again."""
        due = self._last_scan + (self._scan_s() if not self._wake.is_set() else LEAST_SCAN_S)
        end = min(due, time.monotonic() + FULL_S) if self.rounds.busy else due
        while (left := end - time.monotonic()) > 0 and not self.stop():
            if self._wake.wait(min(left, SLICE_S)):
                wait(self._last_scan + LEAST_SCAN_S - time.monotonic(), self.stop)
                return

    def _close(self) -> None:
        self.rounds.drop()
        self._hints.close()
