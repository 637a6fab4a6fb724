"""Fixtures shared by all tests: a real server, folders, settings, and batches to work on.

The server is a real one because the fakes know neither Lua as it is, nor INFO, nor the loss of a connection; it lives
in a folder of its own for the whole run and is emptied before each test.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from contract import claimed, server
from contract.jobs import Completion, ErrorCode, ErrorDetail, ErrorRow, PromptJob, Usage
from contract.ledger import BatchSpec, Cursor, Ledger
from contract.parser import Parsed, parse
from contract.paths import Folders
from contract.queues import Places, connect, enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings, WorkerSettings

PATIENCE_S = 20.0
LIMIT = 1 << 16


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DLLM_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Address of a real server on a unix socket, started once and killed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="dllm-"))
    socket = folder / "s"
    process = subprocess.Popen(
        [str(server.find_binary()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(socket.exists)
        yield f"unix://{socket}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A connection as producers and workers have it (answers in bytes), to an empty server."""
    client = connect(redis_url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def ledger(redis: Redis) -> Ledger:
    return Ledger(redis)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path).create()


@pytest.fixture
def worker_settings(folders: Folders, redis_url: str) -> Callable[..., WorkerSettings]:
    """Worker settings on the test's folders and server, with leases and delays short enough to wait for."""

    def settings(**values: Any) -> WorkerSettings:
        quick = {"lease_s": 1.0, "scan_s": 0.1, "linger_ms": 0, "retry_base_s": 0.02, "retry_max_s": 0.1}
        return WorkerSettings(**{"root": folders.root, "redis_url": redis_url, **quick, **values})

    return settings


@pytest.fixture
def producer_settings(folders: Folders, redis_url: str) -> Callable[..., ProducerSettings]:
    """Producer settings on the test's folders and server, scanning often."""

    def settings(**values: Any) -> ProducerSettings:
        quick = {"scan_s": 0.1, "settle_s": 0.0}
        return ProducerSettings(**{"root": folders.root, "redis_url": redis_url, **quick, **values})

    return settings


@pytest.fixture
def submit(ledger: Ledger, redis: Redis, folders: Folders) -> Callable[..., str]:
    """Make a batch of `count` prompts and queue them, source in `.claimed/`; returns the batch id."""

    def submitted(count: int, batch: str = "b", unreadable: tuple[int, ...] = (), **values: Any) -> str:
        spec = {"source": f"{batch}.jsonl", "output": batch, "kind": "jsonl", "model": "demo", "priority": "normal"}
        spec = BatchSpec(
            **{"batch": batch, "params": SamplingParams(), "created_at": time.time(), **spec, **values}  # type: ignore[arg-type]
        )
        assert ledger.create(spec)
        claimed = folders.claimed / batch
        claimed.mkdir()
        (claimed / spec.source).write_text("the source\n")
        (claimed / "batch.json").write_text("{}")
        jobs = [prompt_job(batch, index) for index in range(count) if index not in unreadable]
        target = queue(redis, spec.model, spec.priority)
        end = Cursor(offset=count, line=count + 1, index=count)
        assert ledger.advance(batch, Cursor(), end, unreadable, enqueuing(target, jobs), last=True)
        return batch

    return submitted


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
def claim(redis: Redis, ledger: Ledger, folders: Folders) -> Callable[..., BatchSpec]:
    """Claim a source of `count` rows as batch `b` and queue all of them."""

    def claimed_and_queued(count: int, **values: Any) -> BatchSpec:
        spec = batch_spec(**values)
        claimed.write_manifest(spec, folders)
        source = claimed.source(spec, folders)
        source.write_text("".join(f'{{"id": "id-{index}", "prompt": "prompt {index}"}}\n' for index in range(count)))
        ledger.create(spec)
        with source.open("rb") as stream:
            rows = list(parse(stream, spec, Cursor(), 1 << 20))
        jobs = [parsed.row for parsed in rows]
        assert ledger.advance(
            spec.batch,
            Cursor(),
            rows[-1].cursor,
            [],
            enqueuing(queue(redis, spec.model, spec.priority), jobs),
            last=True,  # type: ignore[arg-type]
        )
        return spec

    return claimed_and_queued


@pytest.fixture
def completion() -> Callable[..., Completion]:
    """An output row for a prompt of `submit`."""
    return completion_row


@pytest.fixture
def failure() -> Callable[..., ErrorRow]:
    """An error row for a prompt of `submit`."""
    return failure_row


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Wait for a condition, never for a time."""
    return wait_for


def waiting_ids(redis: Redis, model: str = "demo", priority: Any = "normal") -> list[str]:
    """Ids of the jobs that wait in a queue: RQ's list, then the backlog of each batch, the next in turn first."""
    target = queue(redis, model, priority)
    batches = [
        *redis.zrange(redis.names.turns(target.name), 0, -1),
        *redis.zrange(redis.names.hours(target.name), 0, -1),
    ]
    keys = [target.key, *(redis.names.backlog(batch.decode()) for batch in dict.fromkeys(batches))]
    return [job_id.decode() for key in keys for job_id in redis.lrange(key, 0, -1)]


def lose(redis: Redis, *job_ids: str) -> None:
    """Take jobs that wait out of the queue without a trace, as a process that dies between two steps does."""
    for job_id in job_ids:
        assert (
            sum(
                redis.lrem(key, 1, job_id)
                for key in Places.of(queue(redis, "demo", "normal"), [job_id.rpartition("-")[0]]).lists
            )
            == 1
        )


def forget(redis: Redis, *job_ids: str) -> None:
    """Take jobs that wait out of Redis altogether, as `rq empty` does."""
    lose(redis, *job_ids)
    redis.delete(*map(Job.key_for, job_ids))


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)


def prompt_job(batch: str, index: int, **values: Any) -> PromptJob:
    usual = {"line": index + 1, "id": f"id-{index}", "prompt": f"prompt {index}", "submitted_at": time.time()}
    return PromptJob(**{"batch": batch, "index": index, **usual, **values})


def completion_row(index: int, output: str | None = None, **values: Any) -> Completion:
    usual: dict[str, Any] = {
        "id": f"id-{index}",
        "prompt": f"prompt {index}",
        "output": f"output {index}" if output is None else output,
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=3, completion_tokens=2),
        "model": "demo",
        "params": {"seed": 7},
        "timing": {"queued_s": 0.1, "denoise_s": 0.2},
        "denoise": {"steps": 4, "forwards": 4, "tokens_per_forward": 0.5},
        "worker": "w",
    }
    return Completion(index=index, **{**usual, **values})


def failure_row(
    index: int, message: str = "it failed", code: ErrorCode = ErrorCode.MODEL_ERROR, **values: Any
) -> ErrorRow:
    detail = ErrorDetail(code=code, message=message, attempts=3)
    usual: dict[str, Any] = {"id": f"id-{index}", "line": index + 1, "prompt": f"prompt {index}", "worker": "w"}
    return ErrorRow(index=index, error=detail, **{**usual, **values})


def batch_spec(**values: Any) -> BatchSpec:
    usual: dict[str, Any] = {"batch": "b", "source": "in.jsonl", "output": "b", "kind": "jsonl", "model": "demo"}
    usual |= {"priority": "normal", "params": SamplingParams(), "created_at": time.time()}
    return BatchSpec(**{**usual, **values})
