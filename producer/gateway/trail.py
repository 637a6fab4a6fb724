"""Who asked for what, and what came of it: a line for each request in `logs/audit.jsonl`.

Apart from the logs, because it says nothing of the machinery. No prompts and outputs unless `log_prompts` is set, and
never a key: keys have names.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import socket
from datetime import UTC, datetime

from contract.logs import BACKUPS
from contract.settings import Settings
from producer.gateway.door import Entry

LOGGER = "dllm.audit"


class Line(logging.Formatter):
    """A record whose message is a dict, as JSON, and where and when it was written."""

    def format(self, record: logging.LogRecord) -> str:
        where = {"timestamp": datetime.now(UTC).isoformat(), "host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**where, **record.msg} if isinstance(record.msg, dict) else where, default=str)


def set_up(settings: Settings) -> None:
    """Write to the file from now on, at any log level."""
    place = settings.folders.logs / "audit.jsonl"
    file = logging.handlers.RotatingFileHandler(
        place, maxBytes=settings.log_max_mb << 20, backupCount=BACKUPS, encoding="utf-8"
    )
    file.setFormatter(Line())
    logger = logging.getLogger(LOGGER)
    for before in logger.handlers:
        before.close()
    logger.handlers, logger.propagate = [file], False
    logger.setLevel("INFO")


def requested(entry: Entry) -> None:
    """The request has ended."""
    logging.getLogger(LOGGER).info({"event": "request", **entry.document()})
