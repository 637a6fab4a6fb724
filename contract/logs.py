"""structlog set-up: readable lines on a terminal, JSON lines in `logs/{name}.jsonl`.

Called once by each command's `main`; importing this module does nothing. Events are those of `contract.events`, and
carry `batch` and `index` where they are about a prompt; lines say of which host, process and worker they are. What
libraries and Python itself have to say comes out as events, too. Secrets do not come out.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

from contract import events
from contract.logfiles import Limits, LogFile, tidy_soon
from contract.masking import Mask, secrets_in, secrets_of
from contract.settings import Settings
from contract.terminal import safe_json, safe_lines

AUDIT = "dllm.audit"
"""The logger of `contract.audit`."""
HOUR_S, DAY_S = 3600.0, 86_400.0
QUIET = (
    "rq",
    "rq.worker",
    "watchdog",
    "urllib3",
    "transformers",
    "huggingface_hub",
    "filelock",
    "asyncio",
    "uvicorn.access",
    "PIL",
)
"""Libraries of which warnings are enough."""
WITH_HANDLERS = ("transformers", "huggingface_hub", "uvicorn", "uvicorn.error", "uvicorn.access", "rq.worker")
"""Libraries that write to the terminal by handlers of their own."""


def set_up(settings: Settings, name: str, quiet: bool = False, worker: str | None = None) -> None:
    """Send all logging, ours and libraries', to stderr and `logs/{name}.jsonl`.

    `quiet` is for commands that answer and end: the terminal is kept to warnings. `worker` is on every line.
    """
    mask = Mask([*secrets_in(os.environ), *secrets_of(settings.redis_url or "")])
    settings.folders.logs.mkdir(parents=True, exist_ok=True)
    file = _Lines(LogFile(settings.folders.logs / f"{name}.jsonl", limits(settings)))
    file.setFormatter(_formatter(mask, _Known(worker), _json))
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setLevel("WARNING" if quiet else settings.log_level.upper())
    terminal.addFilter(_worth_showing)
    plain = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback, sort_keys=False)
    terminal.setFormatter(_formatter(mask, _harmless, plain))
    root = logging.getLogger()
    root.handlers = [file, terminal]
    root.setLevel(settings.log_level.upper())
    for library in QUIET:
        logging.getLogger(library).setLevel("WARNING")
    _set_up_audit(settings, mask)
    logging.captureWarnings(True)
    adopt_libraries()
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    if not quiet:
        tidy_soon(settings.folders.logs, limits(settings), name)


def _set_up_audit(settings: Settings, mask: Mask) -> None:
    """A file of its own, written at any log level, and nothing on the terminal."""
    kept = replace(limits(settings), keep_s=settings.audit_keep_days * DAY_S)
    handler = _AuditLines(LogFile(settings.folders.logs / "audit.jsonl", kept, locked=True), mask)
    logger = logging.getLogger(AUDIT)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel("INFO")


def adopt_libraries() -> None:
    """Let what libraries log come to us alone. Some take it up with the terminal when they are imported: call it again
    after that."""
    for library in WITH_HANDLERS:
        logger = logging.getLogger(library)
        logger.handlers.clear()
        logger.propagate = True


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


def host() -> str:
    """This machine's name, in letters that file names and Redis take."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())


def limits(settings: Settings) -> Limits:
    """When log files are rotated, and how long they are kept."""
    return Limits(
        max_bytes=settings.log_max_mb << 20,
        max_age_s=settings.log_max_hours * HOUR_S,
        keep_s=settings.log_keep_days * DAY_S,
        keep_bytes=settings.log_keep_mb << 20,
    )


def _shared() -> list[Any]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _formatter(mask: Mask, *last: Any) -> _Masked:
    meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    return _Masked(mask, foreign_pre_chain=[*_shared(), _foreign], processors=[meta, *last])


class _Masked(structlog.stdlib.ProcessorFormatter):
    """Masks the finished line, so that nothing passes by: neither a traceback nor a library's message."""

    def __init__(self, mask: Mask, **options: Any) -> None:
        super().__init__(**options)
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(super().format(record))


class _Known:
    """Puts first what every line has."""

    def __init__(self, worker: str | None) -> None:
        self._worker = {"worker": worker} if worker else {}
        self._where = {"host": host(), "pid": os.getpid()}

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        first = {name: event.pop(name, None) for name in ("timestamp", "level", "event")}
        return {**first, **self._where, **self._worker, **event}


def _json(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    with_traceback = structlog.processors.format_exc_info(logger, method, event)
    return str(structlog.processors.JSONRenderer(_dumped, ensure_ascii=False)(logger, method, with_traceback))


def _dumped(event: Any, **options: Any) -> str:
    return safe_json(json.dumps(event, **options))


def _foreign(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A library's message is no name of an event: it becomes the text of one."""
    record: logging.LogRecord = event["_record"]
    event["message"], event["logger"] = event.pop("event"), record.name
    event["event"] = "python_warning" if record.name == "py.warnings" else "library_message"
    return event


def _worth_showing(record: logging.LogRecord) -> bool:
    name = record.msg.get("event") if isinstance(record.msg, dict) else None
    return name not in events.IN_FILE_ONLY


class _Lines(logging.Handler):
    """Hands lines to their file. A disk that takes none is told of when it takes them again."""

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception:  # noqa: BLE001 - as logging's own handlers do: what cannot be logged ends nobody's work
            self.handleError(record)
            return
        lost = self._file.lost
        if self._file.write(line) and lost:
            self._file.lost = 0
            get().warning("log_lines_lost", lines=lost)

    def close(self) -> None:
        self._file.close()
        super().close()


class _AuditLines(logging.Handler):
    """Writes what `contract.audit` says: records whose message is a dictionary."""

    def __init__(self, file: LogFile, mask: Mask) -> None:
        super().__init__()
        self._file = file
        self._mask = mask

    def emit(self, record: logging.LogRecord) -> None:
        fields = dict(record.msg) if isinstance(record.msg, dict) else {"event": record.getMessage()}
        when = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        line = {"timestamp": when, "level": "info", "event": fields.pop("event"), "host": host(), "pid": os.getpid()}
        text = safe_json(json.dumps(line | fields, ensure_ascii=False, default=str))
        if not self._file.write(self._mask(text) + "\n"):
            get(batch=fields.get("batch")).error("audit_failed", reason=f"{self._file.path} cannot be written")

    def close(self) -> None:
        self._file.close()
        super().close()
