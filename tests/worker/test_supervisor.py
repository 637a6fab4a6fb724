"""The supervisor on children that are a line of Python each: what it restarts, when it gives up, how it stops."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from contract.errors import SettingsError
from worker.devices import devices
from worker.restarts import GAVE_UP, PREDECESSOR
from worker.supervisor import FAILED_STARTS, Child, Supervisor

WORK = "import socket; line = socket.socket(fileno=int(sys.argv[1])); line.send(b'1');"
STOPS = (
    "import signal; asked = []; signal.signal(signal.SIGTERM, lambda *_: asked.append(1));"
    f"{WORK} note('ready');"
    "[time.sleep(0.01) for _ in iter(lambda: len(asked) < int(sys.argv[3]), False)];"
    "note(f'stopped after {len(asked)}')"
)


class Scene:
    """Supervised children that run `programs` (by name) and write notes into files."""

    def __init__(self, folder: Path, programs: dict[str, str], orders: int = 1) -> None:
        self.folder = folder
        self.programs = programs
        self.orders = orders
        self.logged: list[Any] = []

    def command(self, device: str, name: str, line: int) -> list[str]:
        notes = self.folder / name
        prelude = "import sys, time; note = lambda text: print(text, file=open(sys.argv[2], 'a'), flush=True);"
        program = prelude + "note('started');" + self.programs[name]
        return [sys.executable, "-c", program, str(line), str(notes), str(self.orders)]

    def notes(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def run(self) -> int:
        children = [Child("cpu", name) for name in self.programs]
        supervisor = Supervisor(children, self.command, structlog.stdlib.get_logger(), first_pause_s=0.01)
        with capture_logs() as self.logged:
            return supervisor.run()

    def events(self, level: str) -> list[Any]:
        return [event for event in self.logged if event["log_level"] == level]


def when(condition: Callable[[], bool], action: Callable[[], None], wait_until: Callable[..., None]) -> None:
    """Do it beside the supervisor, which holds the main thread."""

    def body() -> None:
        wait_until(condition)
        action()

    threading.Thread(target=body, daemon=True).start()


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


def test_children_that_end_well_are_not_started_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"w-0": WORK, "w-1": "pass"})
    assert scene.run() == 0
    assert [scene.notes(name) for name in scene.programs] == [["started"]] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_order_to_stop_goes_to_every_child(tmp_path: Path, wait_until: Callable[..., None], number: int) -> None:
    scene = Scene(tmp_path, {"w-0": STOPS, "w-1": STOPS})
    when(lambda: all("ready" in scene.notes(name) for name in scene.programs), lambda: tell(number), wait_until)
    assert scene.run() == 0
    assert [scene.notes(name)[-1] for name in scene.programs] == ["stopped after 1"] * 2


def test_the_second_order_is_passed_on_too(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    counts = STOPS.replace("asked.append(1)", "(asked.append(1), note('asked'))")
    scene = Scene(tmp_path, {"w-0": counts, "w-1": counts}, orders=2)

    def all_noted(note: str) -> bool:
        return all(note in scene.notes(name) for name in scene.programs)

    when(lambda: all_noted("ready"), lambda: tell(signal.SIGTERM), wait_until)
    when(lambda: all_noted("asked"), lambda: tell(signal.SIGINT), wait_until)
    assert scene.run() == 0
    assert [scene.notes(name)[-1] for name in scene.programs] == ["stopped after 2"] * 2


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    once = f"{WORK} sys.exit(3) if open(sys.argv[2]).read().count('started') <= 3 else None"
    scene = Scene(tmp_path, {"w-0": once, "w-1": "pass"})
    assert scene.run() == 0
    assert scene.notes("w-0") == ["started"] * 4
    assert scene.notes("w-1") == ["started"]
    assert [(event["child"], event["code"]) for event in scene.events("error")] == [("w-0", 3)] * 3


def test_failed_starts_in_a_row_end_it_all(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"w-0": "sys.exit(1)", "w-1": STOPS})
    assert scene.run() == 1
    assert scene.notes("w-0") == ["started"] * FAILED_STARTS
    assert scene.notes("w-1")[-1] in ("started", "ready", "stopped after 1")
    (event,) = scene.events("critical")
    assert (event["child"], event["failed_starts"]) == ("w-0", FAILED_STARTS)


def test_a_child_that_gave_up_ends_it_all_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"w-0": f"{WORK} sys.exit({GAVE_UP})", "w-1": STOPS})
    assert scene.run() == 1
    assert scene.notes("w-0") == ["started"]
    (event,) = scene.events("critical")
    assert event["child"] == "w-0"


def test_a_child_is_told_how_the_one_before_it_ended(tmp_path: Path) -> None:
    """Only where that one had begun to work: else it held no prompts."""
    program = (
        f"import os, signal; note(os.environ.get({PREDECESSOR!r}, 'nothing'));"
        "n = open(sys.argv[2]).read().count('started'); n == 4 and sys.exit(0)\n"
        f"if n == 1: {WORK} os.kill(os.getpid(), signal.SIGKILL)\n"
        f"if n == 3: {WORK}\n"
        "sys.exit(10 + n)"
    )
    scene = Scene(tmp_path, {"w-0": program})
    assert scene.run() == 0
    told = [note for note in scene.notes("w-0") if note != "started"]
    assert told == ["nothing", "signal 9 (SIGKILL)", "nothing", "exit code 13"]


def test_a_start_that_succeeds_clears_the_count(tmp_path: Path) -> None:
    """Every third start works before it dies; the eighth ends well."""
    program = (
        f"n = open(sys.argv[2]).read().count('started'); n == 8 and sys.exit(0)\nif n % 3 == 0: {WORK}\nsys.exit(1)"
    )
    scene = Scene(tmp_path, {"w-0": program})
    assert scene.run() == 0
    assert scene.notes("w-0") == ["started"] * 8
    assert scene.events("critical") == []


def test_wrong_usage_is_not_tried_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, {"w-0": "sys.exit(2)"})
    assert scene.run() == 2
    assert scene.notes("w-0") == ["started"]


def test_a_child_stopped_before_it_worked_did_as_told(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    scene = Scene(tmp_path, {"w-0": "time.sleep(600)"})
    when(lambda: bool(scene.notes("w-0")), lambda: tell(signal.SIGTERM), wait_until)
    assert scene.run() == 0


def test_a_child_that_fails_while_stopping_fails_the_command(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    scene = Scene(tmp_path, {"w-0": STOPS + "; sys.exit(1)", "w-1": STOPS})
    when(lambda: all("ready" in scene.notes(name) for name in scene.programs), lambda: tell(signal.SIGTERM), wait_until)
    assert scene.run() == 1
    assert scene.notes("w-0").count("started") == 1


def test_devices_are_named_one_by_one() -> None:
    assert devices("auto") == ["auto"]
    assert devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert all(device == "cpu" or device.startswith("cuda:") for device in devices("all"))


@pytest.mark.parametrize("setting", ["", "cpu,", "all,cpu"])
def test_a_list_that_is_not_one_is_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match="device = "):
        devices(setting)
