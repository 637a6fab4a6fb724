"""Open batches advance in turn, a chunk each, so that a long one does not keep a short one waiting.

Whoever submits for as long as it runs does it by this: `producer watch` and `producer serve`. Waiting for room keeps no
other batch from its turn, and an outage of Redis only delays.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from contract import sealing
from contract.ledger import BatchSpec, Ledger
from contract.settings import ProducerSettings
from producer.claims import Claims
from producer.notices import Notices
from producer.submitter import OUTAGES, Progress, Submission, pause_after, wait

ACTIVE = 16
"""Batches submitted in turn; each holds an open file and its list of ids. The rest wait until one ends or is full."""


class Rounds:
    """The batches that are being submitted. `stop` is asked often and ends it between chunks."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, claims: Claims, stop: Callable[[], bool]) -> None:
        self._settings = settings
        self._ledger = ledger
        self._claims = claims
        self._stop = stop
        self._notices = Notices()
        self._active: dict[str, Submission] = {}
        self._new: deque[BatchSpec] = deque()
        self._waiting: deque[BatchSpec] = deque()
        """Batches that had their turn, and wait for room."""
        self.outages = 0
        """Times in a row that Redis did not answer."""

    @property
    def busy(self) -> bool:
        """Is there anything to submit?"""
        return bool(self._active or self._lined_up)

    @property
    def _lined_up(self) -> int:
        """How many batches wait for a place."""
        return len(self._new) + len(self._waiting)

    def look(self) -> None:
        """Line up the claimed batches that are not submitted to their end, and publish those that are complete."""
        known = {*self._active, *(spec.batch for spec in itertools.chain(self._new, self._waiting))}
        self._new.extend(self._claims.pending(known))
        sealing.seal_ready(self._ledger, self._settings.folders, self._settings.keep_segments_s)

    def advance(self) -> bool:
        """One chunk of each active batch; False when all of them wait for room.

        While others wait for a place, batches without room make way, as many as there are.
        """
        self._activate()
        advanced, others = False, self._lined_up
        for batch, submission in list(self._active.items()):
            if self._stop():
                break
            progress = self._step(submission)
            advanced |= progress is Progress.ADVANCED
            if progress in (None, Progress.FINISHED, Progress.LET_GO):
                del self._active[batch]
                advanced |= bool(self._lined_up)
            elif progress is Progress.FULL and others > 0:
                others -= 1
                submission.close()
                del self._active[batch]
                self._waiting.append(submission.spec)
        return advanced

    def patiently(self, work: Callable[[], bool]) -> bool | None:
        """Do `work`; after an outage of Redis drop what was under way, wait, and say None."""
        try:
            done = work()
            self.outages = 0
            return done
        except OUTAGES as error:
            self.outages += 1
            self.drop()
            wait(pause_after(self.outages, error), self._stop)
            return None

    def drop(self) -> None:
        """Let go of all batches, for anybody to go on with."""
        for submission in self._active.values():
            submission.close()
        self._active.clear()
        self._new.clear()
        self._waiting.clear()

    def _activate(self) -> None:
        """Give waiting batches the places that are free: new ones, the oldest first, before those that had a turn."""
        while self._lined_up and len(self._active) < ACTIVE:
            spec = (self._new or self._waiting).popleft()
            self._active[spec.batch] = Submission(spec, self._ledger, self._settings, self._stop)

    def _step(self, submission: Submission) -> Progress | None:
        """None when the batch's files cannot be read or written now; the next look tries again."""
        batch = submission.spec.batch
        try:
            progress = submission.step()
            self._notices.clear(batch)
            return progress
        except OSError as error:
            submission.close()
            self._notices.warn(batch, "submitting_interrupted", batch=batch, reason=str(error))
            return None
