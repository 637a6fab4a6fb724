"""A worker that cannot go on becomes a new process: the same command, the same process id, nothing else kept.

An error of the device can leave the process without a device: every later call fails, whatever it is asked for. The
same holds for a step that never ends. Executing the command anew is the only cure, and because the process id stays,
whoever started the worker (a shell, systemd, Kubernetes, our supervisor) need not know of it. How often it happened in
a row is handed over in the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from types import TracebackType
from typing import NoReturn

import structlog

from worker.progress import Progress

COUNT = "WORKER_RESTARTS"
PREDECESSOR = "WORKER_PREDECESSOR"
"""How the process ended in whose place this one was started; set by the supervisor."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LONGEST_REASON = 200
GAVE_UP = 69
"""Exit code that tells the supervisor not to start this worker again; without a supervisor it is 1."""

POISON = re.compile(
    r"\b(CUDA|HIP)( driver)? error\b|Triton Error \[(CUDA|HIP)\]"
    r"|device-side assert|illegal memory access|unspecified launch failure|uncorrectable ECC",
    re.IGNORECASE,
)
MEMORY = re.compile(r"out of memory|_ALLOC_FAILED", re.IGNORECASE)


def poisons(error: BaseException | None) -> bool:
    """Does `error` leave this process without a usable device? Lack of memory does not."""
    if not isinstance(error, RuntimeError):  # torch's AcceleratorError is one, and so are those of its libraries
        return False
    text = str(error)
    return bool(POISON.search(text)) and not MEMORY.search(text)


def first_line(error: BaseException) -> str:
    """Kind and first line; torch adds advice and stacks of its own below."""
    text = str(error).strip().partition("\n")[0][:LONGEST_REASON]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Restarts:
    """Around the work of a worker's process: begins with the back-off, and ends poisonous errors by a restart.

    `most` is the number of restarts in a row without a finished row in between; then the process gives up. `line` is
    the descriptor of the supervisor's socket, the one thing besides standard input and outputs that is kept.
    """

    def __init__(self, most: int, progress: Progress, log: structlog.stdlib.BoundLogger, line: int | None) -> None:
        self.predecessor = os.environ.pop(PREDECESSOR, None)
        self._in_a_row = int(os.environ.pop(COUNT, "0"))
        self._most = most
        self._progress = progress
        self._log = log
        self._line = line
        self._stopping = False

    def __enter__(self) -> Restarts:
        if self._in_a_row:
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._in_a_row - 1))
            self._log.warning("process_restarted", in_a_row=self._in_a_row, begins_in_s=pause)
            time.sleep(pause)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not poisons(error):
            return False
        self._log.error("device_error", in_a_row=self._in_a_row, exc_info=error)
        if not self._stopping:
            self.again(first_line(error))
        return True

    def stop(self) -> None:
        """The worker was told to stop: an error on the way out is no reason to begin anew."""
        self._stopping = True

    def again(self, reason: str) -> NoReturn:
        """Begin anew, or give up. From any thread: the others end with the old program."""
        in_a_row = 1 if self._progress.finished else self._in_a_row + 1
        if self._stopping:
            self._give_up(f"{reason}, while the worker was stopping")
        if in_a_row > self._most:
            self._give_up(f"{reason}; restarted {self._most} times in a row without finishing a prompt in between")
        os.environ[COUNT] = str(in_a_row)
        _keep_open(self._line)
        try:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        except OSError as error:
            self._give_up(f"{reason}; cannot begin anew: {error}")

    def _give_up(self, reason: str) -> NoReturn:
        self._log.critical("given_up", reason=reason)
        os.write(2, f"error: giving up: {reason}\n".encode(errors="replace"))
        os._exit(1 if self._line is None else GAVE_UP)


def _keep_open(line: int | None) -> None:
    """No descriptor but the standard ones and `line` reaches the new program: one of the device's would keep it."""
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/dev/fd")):
            if number > 2 and number != line:
                with contextlib.suppress(OSError):  # the one that listed them is closed by now
                    os.set_inheritable(number, False)


def how_ended(code: int) -> str:
    """What a process's exit code says, negative for a signal as subprocess has it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
