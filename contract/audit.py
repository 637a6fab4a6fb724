"""Who asked for what, and what came of it: `logs/audit.jsonl`, for those who have to account for it.

Apart from the logs, because it is kept longer and says nothing of the machinery. No prompts, no outputs; secrets are
masked as everywhere. Written by processes that called `logs.set_up`, at any log level; a line that does not get onto
the disk stops no work, and the log says so.
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Mapping
from typing import Any

from contract.ledger import Batch, BatchSpec
from contract.logs import AUDIT

NAME = "audit"
"""Stem of the file."""
COMMAND, WATCH, FOUND = "command", "watch", "found"
"""What asked, beside the names of HTTP keys: a command, a dropped file, a claim whose maker died on the way."""


def submitted(spec: BatchSpec, size: int, via: str) -> None:
    """A batch is about to be made of a file of `size` bytes."""
    params = spec.params.model_dump(exclude_none=True)
    asked = {"model": spec.model, "priority": spec.priority, "params": params, "output_format": spec.output_format}
    _asked("submitted", spec.batch, via, file=spec.source, bytes=size, **asked)


def requeued(batch: str, rows: int, via: str = COMMAND) -> None:
    """`rows` of the batch that had failed or were cancelled run again; none are not worth a line."""
    if rows:
        _asked("requeued", batch, via, rows=rows)


def cancelled(batch: str, rows: int, via: str = COMMAND) -> None:
    if rows:
        _asked("cancelled", batch, via, rows=rows)


def requested(fields: Mapping[str, Any]) -> None:
    """A request of `producer serve` has ended; `fields` say whose it was and what came of it, and hold no text."""
    logging.getLogger(AUDIT).info({"event": "request", **fields})


def published(record: Batch, now: float) -> None:
    """How the batch ended; `now` is the server's time."""
    counts = record.counts.model_dump(include={"done", "failed", "cancelled"})
    ended = {"output_tokens": record.output_tokens, "wall_s": round(now - record.spec.created_at, 3)}
    _write("published", record.spec.batch, model=record.spec.model, rows=record.counts.total, **counts, **ended)


def _asked(event: str, batch: str, via: str, **fields: Any) -> None:
    _write(event, batch, via=via, user=_user(), **fields)


def _write(event: str, batch: str, **fields: Any) -> None:
    logging.getLogger(AUDIT).info({"event": event, "batch": batch, **fields})


def _user() -> str:
    """The operating system's name for who runs this process; its number where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
