"""The watchdog bites when a step does not end, and only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from worker.progress import Progress
from worker.watchdog import Watchdog

TIMEOUT_S = 0.5


class Scene:
    """A watchdog whose bite is noted instead of ending the process."""

    def __init__(self, last_words: Callable[[str], object] = lambda reason: None) -> None:
        self.progress = Progress()
        self.bites: list[str] = []
        self.said: list[str] = []

        def speak(reason: str) -> None:
            last_words(reason)
            self.said.append(reason)

        self.watchdog = Watchdog(self.progress, TIMEOUT_S, speak, self.bites.append, structlog.stdlib.get_logger())


def test_a_step_that_does_not_end_is_logged_with_all_stacks_and_ends_the_process(
    wait_until: Callable[..., None],
) -> None:
    scene, going_on = Scene(), threading.Event()

    def hang_somewhere() -> None:
        with scene.progress.step(3):
            going_on.wait()

    loop = threading.Thread(target=hang_somewhere)
    with structlog.testing.capture_logs() as events, scene.watchdog:
        loop.start()
        wait_until(lambda: scene.bites)
    going_on.set()
    loop.join()
    assert scene.bites == scene.said == ["a denoise step did not end within 0.5 s"]
    (event,) = events
    assert (event["event"], event["log_level"], event["step"], event["rows"]) == ("step_timeout", "critical", 1, 3)
    assert "in hang_somewhere" in event["stacks"]


def test_steps_that_end_and_long_pauses_between_them_are_fine() -> None:
    scene = Scene()
    with scene.watchdog:
        for _ in range(30):
            with scene.progress.step(1):
                time.sleep(TIMEOUT_S / 10)
        time.sleep(2 * TIMEOUT_S)
    assert scene.bites == []


def test_a_log_or_a_server_that_hangs_too_does_not_save_the_process(
    wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.watchdog.LAST_WORDS_S", 0.01)
    freed = threading.Event()
    scene = Scene(last_words=lambda reason: freed.wait())
    with scene.watchdog, scene.progress.step(1):
        wait_until(lambda: scene.bites)
    assert scene.said == []
    freed.set()


def test_only_steps_with_rows_are_counted() -> None:
    progress: Any = Progress()
    for rows in (0, 2, 0, 1):
        with progress.step(rows):
            assert progress.stepping
    assert (progress.steps, progress.rows, progress.stepping) == (2, 1, False)
