"""What all commands stand on: settings, folders and a server; signals that ask to stop; errors in one line.

Exit codes: 0 all well, 1 something failed, 2 wrong usage, 130 interrupted while watching or submitting a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import typer
from redis.exceptions import RedisError

from contract import formats, logs, queues, server
from contract.errors import DllmError, UsageError
from contract.ledger import Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings, read
from producer import display

INTERRUPTED = 130
LOG = "producer-{}"
"""Hosts may share the folder, and a file of several hosts would not hold whole lines."""


class Stop:
    """True once SIGINT or SIGTERM came. The second signal does what it would do without us."""

    def __init__(self) -> None:
        self._stopped = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._stopped

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass
class Session:
    """What every command needs: settings, folders that exist, logs, and a ledger with a server behind it."""

    settings: ProducerSettings
    ledger: Ledger
    _told: bool = False

    @staticmethod
    def open(given: dict[str, Any] | ProducerSettings, quiet: bool = True) -> Session:
        """From settings, or from flags for them. Raises DllmError when one is wrong or Redis is not to be had."""
        settings = read(ProducerSettings, given) if isinstance(given, dict) else given
        formats.require(settings.output_format)
        settings.folders.create()
        logs.set_up(settings, LOG.format(logs.host()), quiet)
        return Session(settings, Ledger(server.open_redis(settings)))

    @property
    def folders(self) -> Folders:
        return self.settings.folders

    def tell_if_no_worker(self) -> None:
        """Say once what is missing when nobody is there to take the prompts."""
        model = self.settings.queue_model
        if self._told or any(worker.serves(model) for worker in queues.workers(self.ledger.redis)):
            return
        self._told = True
        default = self.settings.model == ProducerSettings.model_fields["model"].default
        command = "worker run" if default else f"worker run --model {self.settings.model}"
        display.say(f"no worker for model '{model}' is alive: start one with `{command}`")


@contextlib.contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Turn our errors into one line on stderr and an exit code; anything else is a bug and shows its traceback."""
    try:
        yield
    except BrokenPipeError:
        # The reader had enough. Python would complain once more when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (DllmError, RedisError, OSError) as error:
        if debug:
            raise
        display.say(f"error: {error}")
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
