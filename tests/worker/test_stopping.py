"""The signals that a real worker process gets: the first leaves it its grace time, the second does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from contract.ledger import Counts, Ledger
from contract.paths import Folders
from contract.queues import queue
from tests.checkpoints import llama_block
from tests.conftest import waiting_ids

ROOT = Path(__file__).parent.parent.parent
FAULTY = Path(__file__).parent / "faulty_worker.py"
START_S = 90.0


@pytest.fixture
def slow_worker(
    folders: Folders, redis_url: str, redis: Redis, wait_until: Callable[..., None]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a worker whose steps take their time; returns it when it runs its four rows."""
    llama_block(folders.root / "models" / "tiny")
    started: list[subprocess.Popen[bytes]] = []

    def start(**values: object) -> subprocess.Popen[bytes]:
        given = {"root": folders.root, "redis_url": redis_url, "model": "tiny", "dtype": "float32", "threads": 1}
        given |= {"max_rows": 4, "name": "w", **values}
        process = subprocess.Popen(
            [sys.executable, str(FAULTY), "slow", "any", "run"],
            env={**os.environ, "PYTHONPATH": str(ROOT), **{f"DLLM_{key.upper()}": str(given[key]) for key in given}},
            cwd=folders.root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        wait_until(lambda: steps(folders) > 0, START_S)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def steps(folders: Folders) -> int:
    file = folders.root / "steps"
    return file.stat().st_size if file.exists() else 0


def test_a_second_sigterm_gives_everything_back_at_once(
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    submit: Callable[..., str],
    slow_worker: Callable[..., subprocess.Popen[bytes]],
    wait_until: Callable[..., None],
) -> None:
    submit(6, model="tiny")
    worker = slow_worker(grace_s=3600)
    worker.send_signal(signal.SIGTERM)
    heard = steps(folders) + 2
    wait_until(lambda: steps(folders) >= heard)  # it goes on; two signals at once might be taken for one
    assert redis.zcard(queue(redis, "tiny", "normal").started_job_registry.key) == 4
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0
    assert waiting_ids(redis, "tiny") == [f"b-{index}" for index in range(6)]
    assert not redis.exists(ledger.key("b", "starts"))
    assert ledger.get("b").counts == Counts(total=6, submitted=6, done=0, failed=0)  # type: ignore[union-attr]


def test_after_the_grace_time_the_rest_is_given_back(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    slow_worker: Callable[..., subprocess.Popen[bytes]],
) -> None:
    submit(6, model="tiny")
    worker = slow_worker(grace_s=0.2)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0
    assert waiting_ids(redis, "tiny") == [f"b-{index}" for index in range(6)]
    assert not redis.exists(ledger.key("b", "starts"))
