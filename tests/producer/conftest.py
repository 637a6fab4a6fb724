"""What the producer's tests share: sources read without a server, and batches submitted to one."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import Result
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs
from typer.testing import CliRunner

from contract import sealing
from contract.jobs import ErrorRow, PromptJob
from contract.ledger import BatchSpec, BatchState, Ledger
from contract.paths import Folders
from contract.queues import queue
from contract.settings import ProducerSettings
from producer import watcher
from producer.claims import Claims
from producer.cli import app
from producer.submitter import submit as submit_claimed
from tests.conftest import waiting_ids

PRODUCER = [sys.executable, "-c", "from producer.cli import main; main()"]
"""The installed command, with the interpreter that runs the tests."""


class Faulty(Ledger):
    """A ledger whose connection breaks: `before` and `after` say at which calls of `advance`, counted from 0."""

    def __init__(self, redis: Redis, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> None:
        super().__init__(redis)
        self.before, self.after, self.calls = before, after, -1

    def advance(self, *args: Any, **values: Any) -> bool:
        self.calls += 1
        if self.calls in self.before:
            raise RedisConnectionError("gone before")
        moved = super().advance(*args, **values)
        if self.calls in self.after:
            raise RedisConnectionError("gone after")
        return moved


@pytest.fixture
def run(
    folders: Folders, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Run a `producer` command on the test's root and emptied server."""
    monkeypatch.setenv("DLLM_ROOT", str(folders.root))
    monkeypatch.setenv("DLLM_REDIS_URL", redis_url)
    root = logging.getLogger()
    before = root.handlers, root.level
    yield lambda *words: CliRunner().invoke(app, [str(word) for word in words])
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers, root.level = before
    structlog.reset_defaults()


@pytest.fixture
def queued(redis: Redis) -> Callable[..., list[PromptJob]]:
    """The prompts that stand in a queue, in its order."""

    def read(model: str = "demo", priority: Any = "normal") -> list[PromptJob]:
        jobs = [queue(redis, model, priority).fetch_job(job_id) for job_id in waiting_ids(redis, model, priority)]
        return [PromptJob.model_validate(job.args[0]) for job in jobs if job]

    return read


@pytest.fixture
def submit_file(
    ledger: Ledger, producer_settings: Callable[..., ProducerSettings]
) -> Callable[..., tuple[BatchSpec, list[ErrorRow]]]:
    """Submit the user's own file to its end: its batch, and its error rows."""

    def run(file: Path, **values: Any) -> tuple[BatchSpec, list[ErrorRow]]:
        settings = producer_settings(**values)
        spec = Claims(settings, ledger).snapshot(file)
        assert submit_claimed(spec, ledger, settings)
        return spec, list(sealing.errors(spec.batch, ledger, settings.folders))

    return run


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Events logged by the code under test, as dictionaries."""
    with capture_logs() as events:
        yield events


@pytest.fixture
def watching(redis: Redis, producer_settings: Callable[..., ProducerSettings], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`with watching(): …` has a watcher run in a thread; it stops, and must end, at the end of the block."""
    monkeypatch.setattr(watcher, "LEAST_SCAN_S", 0.02)

    @contextmanager
    def run(**values: Any) -> Iterator[watcher.Watcher]:
        told = threading.Event()
        watching = watcher.Watcher(producer_settings(**values), Ledger(redis), told.is_set)
        thread = threading.Thread(target=watching.run, daemon=True)
        thread.start()
        try:
            yield watching
        finally:
            told.set()
            thread.join(10)
            assert not thread.is_alive()

    return run


def submitted(ledger: Ledger, count: int) -> Callable[[], bool]:
    """Are there `count` batches, all of them submitted?"""
    return lambda: [batch.state for batch in ledger.newest(1000)] == [BatchState.RUNNING] * count
