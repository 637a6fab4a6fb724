"""Where a request's answer leaves the worker: on the stream of the service that asked, for whoever waits there.

What tells how a row stands is sent when the loop settles, once a turn; it may come late or twice, never out of order.
The last reply of a row is sent by the step that ends its job, so it is sent once, and by the row's owner alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.interactive import Kind, Reply, fields_of
from worker.intake import Intake, Rejected, Taken
from worker.sinks import Ended, Settled
from worker.transcript import Transcript


class Replies:
    """The rows of requests. `flush` what was told of them, often."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._unsent: list[tuple[Taken, dict[str, str | int]]] = []

    def started(self, taken: Taken) -> None:
        told: dict[str, Any] = {"worker": self._intake.name}
        if (runs := taken.attempt + taken.suspect) > 1:
            self._tell(taken, "again", {**told, "attempt": runs})
        else:
            self._tell(taken, "started", told)

    def progressed(self, taken: Taken, transcript: Transcript, seconds: float) -> None:
        if not taken.job.stream:
            return
        at = transcript.shown
        if piece := transcript.piece():
            tokens = len(transcript.token_ids)
            self._tell(taken, "block", {"at": at, "text": piece, "tokens": tokens, "seconds": round(seconds, 3)})

    def flush(self) -> None:
        """Send what was told. While the server is away it is kept."""
        unsent = [(taken.reply_to, fields) for taken, fields in self._unsent]
        if unsent and self._intake.tell([(stream, fields) for stream, fields in unsent if stream]):
            self._unsent.clear()

    def settle(self, ended: Sequence[Ended]) -> Settled:
        self.flush()
        over = [one.taken for one in ended]
        self._unsent = [told for told in self._unsent if told[0] not in over]  # their last reply says it all
        answered = [one for one in ended if not one.error]
        failed = [one for one in ended if one.error]
        if failed:
            self._intake.answer([(one.taken, _last(one, "failed")) for one in failed])
        rows = self._intake.answer([(one.taken, _last(one, "done")) for one in answered])
        return Settled(rows, sum(one.tokens for one in answered))

    def _tell(self, taken: Taken, kind: Kind, data: Mapping[str, Any]) -> None:
        self._unsent.append((taken, _fields(taken, kind, data)))


def _last(ended: Ended, kind: Kind) -> dict[str, str | int]:
    return _fields(ended.taken, kind, ended.row.model_dump(mode="json"))


def _fields(taken: Taken | Rejected, kind: Kind, data: Mapping[str, Any]) -> dict[str, str | int]:
    return fields_of(Reply(taken.batch, taken.index, kind, data))
