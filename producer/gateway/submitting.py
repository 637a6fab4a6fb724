"""The service submits batches as `producer watch` does, in a thread of its own, and goes on with those it finds."""

from __future__ import annotations

import threading
import time

from contract import logs
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer.claims import Claims
from producer.notices import Notices
from producer.rounds import Rounds

FULL_S = 0.1


class Submitting:
    """Runs from `start` to `stop`."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger) -> None:
        self._scan_s = settings.scan_s
        self._rounds = Rounds(settings, ledger, Claims(settings, ledger), self._told_to_stop)
        self._notices = Notices()
        self._stopped = threading.Event()
        self._new = threading.Event()
        self._looked = float("-inf")
        self._thread = threading.Thread(target=self._run, name="submitting", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        """There is a new batch."""
        self._new.set()

    def stop(self) -> None:
        """Ends between two chunks; whoever comes next goes on from there."""
        self._stopped.set()
        self._new.set()
        self._thread.join()

    def _told_to_stop(self) -> bool:
        return self._stopped.is_set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                if not self._rounds.patiently(self._turn):
                    self._new.wait(FULL_S if self._rounds.busy else self._scan_s)
        except Exception:
            logs.get().exception("submitting_ended")
            raise
        finally:
            self._rounds.drop()

    def _turn(self) -> bool:
        if self._new.is_set() or time.monotonic() - self._looked >= self._scan_s:
            self._new.clear()
            self._looked = time.monotonic()
            self._look_whatever_fails()
        return self._rounds.advance()

    def _look_whatever_fails(self) -> None:
        """A full disk or a folder without permission does not end it."""
        try:
            self._rounds.look()
            self._notices.clear("look")
        except OSError as error:
            self._notices.warn("look", "scan_failed", reason=str(error))
