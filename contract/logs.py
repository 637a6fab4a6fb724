"""structlog set-up: readable lines on a terminal, JSON lines in `logs/{name}.jsonl`, rotated by size.

Called once by each command's `main`; importing this module does nothing. Events carry `batch`, `index`, `worker`
as bound values.
"""

from __future__ import annotations

import io
import json
import logging
import logging.handlers
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TextIO

import structlog

from contract.terminal import safe_json, safe_lines

BACKUPS = 5


def set_up(folder: Path, name: str, level: str, max_mb: int, quiet: bool = False) -> None:
    """Send all logging, ours and libraries', to stderr and `folder/name.jsonl`.

    `quiet` keeps the terminal to warnings, for commands that draw a progress bar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    file = logging.handlers.RotatingFileHandler(
        folder / f"{name}.jsonl", maxBytes=max_mb << 20, backupCount=BACKUPS, encoding="utf-8"
    )
    file.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(_json, ensure_ascii=False),
            ],
        )
    )
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel("WARNING" if quiet else level.upper())
    terminal.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _harmless,
                structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [file, terminal]
    root.setLevel(level.upper())
    for library in ("rq", "rq.worker", "watchdog", "urllib3", "transformers"):
        logging.getLogger(library).setLevel("WARNING")
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _json(event: Any, **options: Any) -> str:
    return safe_json(json.dumps(event, **options))


def _harmless(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Texts of others that stand in an event, so that a terminal obeys nothing in them."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = safe_lines(value)
    return event


def _traceback(stream: TextIO, exc_info: Any) -> None:
    """Plain, because the default formatter also shows local variables, that is, people's prompts."""
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(safe_lines(text.getvalue()))


def get(**bound: Any) -> structlog.stdlib.BoundLogger:
    """A logger with `bound` values on every event."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("dllm").bind(**bound)
    return logger
