"""One worker process per device: starts them, restarts those that die, stops them all. Knows no queue and no model.

Each child holds one end of a socket. It writes a byte when it begins to work, so that a failed start can be told from
a later crash; and it reads the end of the stream when the supervisor is gone, however it went, and stops in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import structlog

from contract.settings import PREFIX
from worker.restarts import FIRST_PAUSE_S, GAVE_UP, LONGEST_PAUSE_S, PREDECESSOR, how_ended

FAILED_STARTS = 5
"""So many failed starts of one child in a row, and the supervisor gives up."""
STEADY_S = 60.0
"""A child that lived this long is restarted after the first pause again."""
POLL_S = 0.1
WRONG_USAGE = 2

Command = Callable[[str, str, int], list[str]]
"""Device, name and the number of the child's end of the socket -> what to execute."""


@dataclass
class Child:
    """The worker of one device, through all its processes."""

    device: str
    name: str
    process: subprocess.Popen[bytes] | None = None
    line: socket.socket | None = None
    started_at: float = 0.0
    due: float = 0.0
    failed_starts: int = 0
    quick_ends: int = 0
    last_end: str = ""
    """How the last process that had begun to work ended; told to the next one."""
    code: int = 0
    """How the last process ended; one that was told to stop before it worked did as it was told."""
    ended: bool = False

    def start(self, command: Command, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        told = {PREDECESSOR: self.last_end} if self.last_end else {}
        with theirs:
            self.process = subprocess.Popen(
                command(self.device, self.name, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                env=environment | told,
                pass_fds=[theirs.fileno()],
                # Ctrl-C goes to a terminal's whole group: together with what we pass on, the child would count two.
                process_group=0,
            )
        self.line, self.started_at = ours, time.monotonic()

    def bury(self) -> bool:
        """Forget the process that ended. Had it begun to work?"""
        assert self.line is not None
        with self.line as line:
            line.setblocking(False)
            worked = False
            with contextlib.suppress(OSError):
                worked = line.recv(1) != b""
        self.process = self.line = None
        return worked


@dataclass
class Supervisor:
    """Children that are looked after until the last one has ended."""

    children: list[Child]
    command: Command
    log: structlog.stdlib.BoundLogger
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    first_pause_s: float = FIRST_PAUSE_S
    _asked: int = 0
    _passed_on: int = 0
    _gave_up: int = 0

    def run(self) -> int:
        """Work until every child has ended for good; the exit code, 0 only if all ended with 0."""
        with self._signals():
            while not all(child.ended for child in self.children):
                self._pass_on()
                for child in self.children:
                    if not child.ended:
                        self._look_after(child)
                time.sleep(POLL_S)
        return self._gave_up or int(any(child.code for child in self.children))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._asked += 1

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self) -> None:
        """Every order to stop goes to every child: the first leaves it its grace time, the second does not."""
        while self._passed_on < self._asked:
            self._passed_on += 1
            for child in self.children:
                if child.process is not None:
                    # To a worker SIGINT means the same; to one that still starts up it is a traceback.
                    child.process.send_signal(signal.SIGTERM)

    def _look_after(self, child: Child) -> None:
        if child.process is None:
            if self._passed_on:
                child.ended = True
            elif time.monotonic() >= child.due:
                child.start(self.command, self.environment)
                self.log.info("child_started", child=child.name, device=child.device)
        elif (code := child.process.poll()) is not None:
            self._ended(child, code)

    def _ended(self, child: Child, code: int) -> None:
        lived = time.monotonic() - child.started_at
        worked = child.bury()
        # One that works handles the signal. It may have worked before, and have begun anew since.
        stopped_while_starting = bool(self._passed_on) and code == -signal.SIGTERM
        child.code = 0 if stopped_while_starting else code
        child.ended = child.code == 0 or bool(self._passed_on)
        if child.code == 0:
            return
        self.log.error("child_died", child=child.name, device=child.device, code=code, after_s=round(lived, 1))
        if child.ended:
            return
        child.last_end = how_ended(code) if worked else ""
        child.failed_starts = 0 if worked else child.failed_starts + 1
        child.quick_ends = 0 if lived >= STEADY_S else child.quick_ends + 1
        # Wrong usage stays wrong however often it is tried.
        if code == GAVE_UP or child.failed_starts >= FAILED_STARTS or (code == WRONG_USAGE and not worked):
            self._give_up(child, code)
        else:
            pause = min(LONGEST_PAUSE_S, self.first_pause_s * 2 ** max(0, child.quick_ends - 1))
            child.due = time.monotonic() + pause

    def _give_up(self, child: Child, code: int) -> None:
        self.log.critical(
            "child_given_up",
            child=child.name,
            device=child.device,
            failed_starts=child.failed_starts,
        )
        child.ended = True
        self._gave_up = WRONG_USAGE if code == WRONG_USAGE else 1
        self._asked += 1


def supervise(
    devices: list[str],
    name: str,
    burst: bool,
    flags: dict[str, Any],
    log: structlog.stdlib.BoundLogger,
    metrics_port: int | None = None,
) -> int:
    """Run one `worker run` for each device, named NAME-0, NAME-1 …; returns the exit code.

    Their metrics are at `metrics_port`, where there is one, and the ports after it. `flags` are the command line's;
    children get them in their environment, which is as strong where no flag is.
    """

    def command(device: str, child: str, line: int) -> list[str]:
        run = [sys.executable, "-P", "-m", "worker", "run", "--device", device, "--name", child]
        port = ["--metrics-port", str(ports[child])] if metrics_port else []
        return [*run, "--supervisor", str(line), *port, *(["--burst"] if burst else [])]

    given = {PREFIX + flag.upper(): str(value) for flag, value in flags.items() if value is not None}
    children = [Child(device, f"{name}-{number}") for number, device in enumerate(devices)]
    ports = {child.name: (metrics_port or 0) + number for number, child in enumerate(children)}
    return Supervisor(children, command, log, {**os.environ, **given}).run()


def report(line: int, stop: Callable[[], None]) -> None:
    """The child's side: say that work begins, and `stop` when the supervisor is gone."""
    supervisor = socket.socket(fileno=line)
    with contextlib.suppress(OSError):
        supervisor.send(b"1")

    def wait() -> None:
        with contextlib.suppress(OSError):
            supervisor.recv(1)
        stop()

    threading.Thread(target=wait, name="supervisor", daemon=True).start()
