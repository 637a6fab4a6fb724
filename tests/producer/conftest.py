"""What the producer's tests share: sources read without a server, and batches submitted to one."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from contract import sealing
from contract.jobs import ErrorRow, PromptJob
from contract.ledger import BatchSpec, Cursor, Ledger
from contract.queues import queue
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings
from producer.claims import Claims
from producer.parser import Parsed, parse
from producer.submitter import submit as submit_claimed
from tests.conftest import waiting_ids

LIMIT = 1 << 16
PRODUCER = [sys.executable, "-c", "from producer.cli import main; main()"]
"""The installed command, with the interpreter that runs the tests."""


def batch_spec(**values: Any) -> BatchSpec:
    usual: dict[str, Any] = {"batch": "b", "source": "in.jsonl", "output": "b", "kind": "jsonl", "model": "demo"}
    usual |= {"priority": "normal", "params": SamplingParams(), "created_at": time.time()}
    return BatchSpec(**{**usual, **values})


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
def parsed() -> Callable[..., list[Parsed]]:
    """Read a source from memory: `parsed(content, cursor=…, limit=…, **spec values)`."""

    def read(content: bytes | str, cursor: Cursor | None = None, limit: int = LIMIT, **values: Any) -> list[Parsed]:
        raw = content if isinstance(content, bytes) else content.encode()
        return list(parse(io.BytesIO(raw), batch_spec(**values), cursor or Cursor(), limit))

    return read


@pytest.fixture
def rows(parsed: Callable[..., list[Parsed]]) -> Callable[..., list[PromptJob | ErrorRow]]:
    """The rows alone."""
    return lambda *args, **values: [found.row for found in parsed(*args, **values)]


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
