"""Rows on their way to an object store: durable first, marked then; the loop never waits, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import structlog
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract import segments, stores
from contract.errors import StoreError
from contract.ledger import BatchState, Counts, Cursor, Ledger
from contract.objects import ObjectStore
from contract.paths import Folders
from contract.queues import enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests.checkpoints import llama_block
from tests.conftest import batch_spec, completion_row, prompt_job, waiting_ids
from tests.worker.storing_worker import work
from worker import uploads as uploads_module
from worker.engine import Engine, Finished
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs
from worker.uploads import Uploads, opened

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
START_S = 90.0


class Gate:
    """A store that keeps what is put, refuses as often as told, and holds puts up while it is shut."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.store = store
        self.open = threading.Event()
        self.open.set()
        self.refusals = 0
        self.tried: list[str] = []
        self.put: list[tuple[str, list[int]]] = []

    def put_segment(self, batch: str, name: str, data: bytes) -> None:
        self.tried.append(name)
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the store refuses")
        assert self.open.wait(30)
        if self.store:
            self.store.put_segment(batch, name, data)
        rows = [segments.parse(line + b"\n") for line in data.splitlines()]
        self.put.append((batch, [row["index"] for row in rows if row]))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "root", f"memory://{uuid4().hex}").create()


@pytest.fixture
def gate(folders: Folders) -> Gate:
    store = stores.of(folders)
    assert isinstance(store, ObjectStore)
    return Gate(store)


@pytest.fixture
def uploads(gate: Gate, folders: Folders, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    """Those of a worker, with pauses short enough to wait for; loads are due at once unless a test says otherwise."""
    monkeypatch.setattr(uploads_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploads_module, "LOAD_AGE_S", 0.0)
    with Uploads(gate, folders, ledger, "w") as opened:  # type: ignore[arg-type]
        yield opened
        gate.open.set()


def write(uploads: Uploads, *indices: int, batch: str = "b") -> list[int]:
    """Hand rows over; returns the indices of those that have become durable."""
    return [row.index for _, row in uploads.write([(batch, completion_row(index)) for index in indices])]


# Collecting and putting


def test_a_row_is_given_back_when_its_put_has_returned_and_writing_waits_for_nothing(
    uploads: Uploads, gate: Gate, wait_until: Callable[..., None]
) -> None:
    gate.open.clear()
    assert write(uploads, 0) == []
    wait_until(lambda: gate.tried)
    assert write(uploads) == []
    assert uploads.pending
    assert [row.index for _, row in uploads.left()] == [0]
    gate.open.set()
    durable: list[int] = []
    wait_until(lambda: durable.extend(write(uploads)) or durable)
    assert durable == [0]
    assert (uploads.pending, uploads.left()) == (False, [])


@pytest.mark.parametrize(
    ("limit", "value"), [("LOAD_ROWS", 3), ("LOAD_BYTES", 3 * len(segments.line(completion_row(0))))]
)
def test_rows_are_collected_up_to_a_number_and_a_size(
    uploads: Uploads,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
    limit: str,
    value: int,
) -> None:
    monkeypatch.setattr(uploads_module, "LOAD_AGE_S", 3600.0)
    monkeypatch.setattr(uploads_module, limit, value)
    for index in range(8):
        write(uploads, index)
    wait_until(lambda: len(gate.put) == 2)
    assert sorted(gate.put) == [("b", [0, 1, 2]), ("b", [3, 4, 5])]
    assert [row.index for _, row in uploads.left() if row.index > 5] == [6, 7]


def test_a_row_does_not_wait_long_for_others(
    uploads: Uploads, gate: Gate, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(uploads_module, "LOAD_AGE_S", 0.05)
    write(uploads, 0, 1, batch="a")
    write(uploads, 0)
    wait_until(lambda: len(gate.put) == 2)
    assert sorted(gate.put) == [("a", [0, 1]), ("b", [0])]


def test_a_refused_put_is_repeated_under_its_name_and_stops_the_taking_until_then(
    uploads: Uploads, gate: Gate, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "FIRST_PAUSE_S", 0.05)
    gate.refusals = 3
    assert not uploads.full
    write(uploads, 0)
    wait_until(lambda: uploads.full)
    wait_until(lambda: gate.put)
    assert gate.put == [("b", [0])]
    assert len(gate.tried) == 4
    assert len(set(gate.tried)) == 1
    wait_until(lambda: not uploads.full)
    assert write(uploads) == [0]


def test_a_slow_store_stops_the_taking_before_too_much_waits(
    uploads: Uploads, gate: Gate, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "MOST_ROWS", 3)
    gate.open.clear()
    write(uploads, 0, 1)
    assert not uploads.full
    write(uploads, 2)
    assert uploads.full
    gate.open.set()
    wait_until(lambda: not uploads.full)


def test_one_put_that_hangs_holds_up_no_other(uploads: Uploads, gate: Gate, wait_until: Callable[..., None]) -> None:
    gate.open.clear()
    write(uploads, 0)
    wait_until(lambda: gate.tried)
    gate.open = threading.Event()  # of those that come now
    gate.open.set()
    write(uploads, 1, batch="c")
    wait_until(lambda: gate.put == [("c", [1])])
    assert write(uploads) == [1]
    assert [row.index for _, row in uploads.left()] == [0]


def test_rows_that_belong_elsewhere_are_not_written(
    uploads: Uploads, folders: Folders, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that was started with another place, they would be lost to those who publish."""
    ledger.create(batch_spec(batch="there", outputs_url="s3://elsewhere"))
    ledger.create(batch_spec(batch="here"))
    plain = Outputs(Folders(folders.root), ledger, "w")
    for batch in ("there", "here"):
        with pytest.raises(StoreError, match=f"'{batch}' has its rows in"):
            write(uploads, 0, batch=batch)
    with pytest.raises(StoreError, match="'there' has its rows in s3://elsewhere"):
        plain.write([("there", completion_row(0))])
    plain.write([("here", completion_row(0))])
    assert uploads.left() == []

    def away(*_: Any) -> None:
        raise RedisConnectionError("gone")

    monkeypatch.setattr(Ledger, "get", away)
    with pytest.raises(StoreError, match="not known now"):
        write(uploads, 0)
    assert write(plain, 1, batch="here") == [1]  # type: ignore[arg-type]
    plain.close()


# In the loop


@pytest.fixture
def model(tmp_path: Path, worker_settings: Callable[..., WorkerSettings]) -> Model:
    return open_model(
        worker_settings(model=str(llama_block(tmp_path / "tiny")), dtype="float32", threads=1, max_rows=4)
    )


@pytest.fixture
def loop(
    redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings], model: Model, uploads: Uploads
) -> Iterator[Loop]:
    """A loop at work on the model `tiny`; leaving it is the worker's end."""
    settings = worker_settings(model="tiny", lease_s=10.0)
    with Intake(redis, ledger, settings) as intake:
        yield Loop(intake, model, uploads, grace_s=20.0, log=structlog.get_logger())


@pytest.fixture
def queued(redis: Redis, ledger: Ledger, folders: Folders) -> Callable[..., str]:
    """Queue short prompts as one batch for the model `tiny`."""
    return lambda count, batch="b": queue_prompts(count, batch, folders, redis, ledger)


def queue_prompts(count: int, batch: str, folders: Folders, redis: Redis, ledger: Ledger) -> str:
    spec = batch_spec(batch=batch, output=batch, model="tiny", outputs_url=folders.outputs_url)
    ledger.create(spec)
    params = SamplingParams(max_new_tokens=8, seed=1)
    jobs = [prompt_job(batch, index, params=params) for index in range(count)]
    end = Cursor(offset=1, line=count, index=count)
    assert ledger.advance(batch, Cursor(), end, [], enqueuing(queue(redis, "tiny", "normal"), jobs), last=True)
    return batch


def published(folders: Folders, batch: str = "b") -> list[str]:
    with stores.of(folders).open(f"{batch}.jsonl") as lines:
        return [json.loads(line)["id"] for line in lines]


def ids(count: int) -> list[str]:
    return [f"id-{index}" for index in range(count)]


def answer_first(loop: Loop) -> None:
    """Those that fit into the engine at once run, and their rows are handed over."""
    loop.take()
    while loop.running:
        loop.step()
        loop.settle()


def test_batches_are_published_in_the_store_each_row_once(
    loop: Loop, queued: Callable[..., str], folders: Folders, ledger: Ledger
) -> None:
    queued(9)
    queued(5, "c")
    loop.run(burst=True)
    assert (published(folders), published(folders, "c")) == (ids(9), ids(5))
    assert ledger.open_batches() == []
    assert loop.progress.finished == 14


def test_nothing_is_taken_while_the_store_refuses_and_nothing_is_marked(
    loop: Loop,
    gate: Gate,
    queued: Callable[..., str],
    folders: Folders,
    redis: Redis,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    monkeypatch.setattr("worker.loop.DISK_WAIT_S", 0.0)
    gate.refusals = 1_000_000
    queued(9)
    loop.take()
    while loop.running:
        loop.step()
        loop.settle()
        wait_until(lambda: loop.outputs.full or not loop.outputs.pending)
        loop.take()
    assert len(loop.intake.held()) == 4
    assert waiting_ids(redis, "tiny") == [f"b-{index}" for index in range(4, 9)]
    assert ledger.get("b").counts == Counts(total=9, submitted=9, done=0, failed=0)  # type: ignore[union-attr]
    gate.refusals = 0
    loop.run(burst=True)
    assert published(folders) == ids(9)


def test_stopping_flushes_within_the_grace_time(
    loop: Loop,
    gate: Gate,
    queued: Callable[..., str],
    folders: Folders,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
) -> None:
    gate.open.clear()
    queued(4)
    answer_first(loop)
    thread = threading.Thread(target=loop.run)
    loop.stop()
    thread.start()
    wait_until(lambda: gate.tried)
    assert ledger.get("b").counts.ended == 0  # type: ignore[union-attr]
    gate.open.set()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert published(folders) == ids(4)


@pytest.mark.parametrize("signals", [1, 2])
def test_what_the_store_has_not_taken_is_given_back(
    redis: Redis,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    model: Model,
    uploads: Uploads,
    gate: Gate,
    queued: Callable[..., str],
    signals: int,
) -> None:
    """After the grace time, or at once at the second signal; in order, and as if never started."""
    gate.open.clear()
    queued(6)
    with Intake(redis, ledger, worker_settings(model="tiny", lease_s=10.0)) as intake:
        grace_s = 0.2 if signals == 1 else 3600.0
        loop = Loop(intake, model, uploads, grace_s, structlog.get_logger())
        answer_first(loop)
        for _ in range(signals):
            loop.stop()
        loop.run()
    assert waiting_ids(redis, "tiny") == [f"b-{index}" for index in range(6)]
    assert not redis.exists(ledger.key("b", "starts"))
    assert ledger.get("b").counts.ended == 0  # type: ignore[union-attr]


class Poisoned:
    """An engine that has lost its device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Finished]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_rows_on_their_way_are_not_charged_with_a_device_that_fails(
    redis: Redis,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    model: Model,
    uploads: Uploads,
    gate: Gate,
    queued: Callable[..., str],
) -> None:
    gate.open.clear()
    queued(5)

    def enter() -> None:
        with Intake(redis, ledger, worker_settings(model="tiny", lease_s=10.0)) as intake:
            loop = Loop(intake, model, uploads, grace_s=0.1, log=structlog.get_logger())
            answer_first(loop)
            loop.model = replace(model, engine=Poisoned(model.engine))  # type: ignore[arg-type]
            loop.run()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        enter()
    assert sorted(waiting_ids(redis, "tiny")) == [f"b-{index}" for index in range(5)]
    assert redis.hgetall(ledger.key("b", "starts")) == {b"4": b"1"}


def test_the_way_out_is_chosen_by_where_outputs_go(folders: Folders, ledger: Ledger) -> None:
    assert isinstance(opened(Folders(folders.root), ledger, "w"), Outputs)
    with opened(folders, ledger, "w") as chosen:
        assert isinstance(chosen, Uploads)


# Processes that die


@pytest.fixture
def in_files(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "root", f"file://{tmp_path}/store").create()


def start(script: str, folders: Folders, redis_url: str, *arguments: str) -> subprocess.Popen[bytes]:
    given = {"root": folders.root, "redis_url": redis_url, "outputs_url": folders.outputs_url, "model": "tiny"}
    given |= {"lease_s": 1.0, "scan_s": 0.2, "dtype": "float32", "threads": 1, "max_rows": 4, "name": "w"}
    settings = {f"DLLM_{key.upper()}": str(value) for key, value in given.items()}
    command = [sys.executable, str(HERE / script), *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), **settings}, cwd=folders.root)


MOMENTS = [
    ("segment", "before"),
    ("segment", "after"),
    ("mark", "after"),
    ("b.summary.json", "after"),
    ("close", "before"),
]


@pytest.mark.parametrize(("point", "when"), MOMENTS, ids=["-".join(moment) for moment in MOMENTS])
def test_a_worker_killed_at_any_moment_leaves_each_row_to_be_published_once(
    in_files: Folders,
    redis: Redis,
    redis_url: str,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    when: str,
) -> None:
    monkeypatch.setattr(uploads_module, "LOAD_AGE_S", 0.02)
    queue_prompts(6, "b", in_files, redis, ledger)
    assert start("storing_worker.py", in_files, redis_url, point, when).wait(timeout=60) == -signal.SIGKILL
    work(worker_settings(root=in_files.root, outputs_url=in_files.outputs_url, model="tiny"))
    assert published(in_files) == ids(6)
    assert ledger.get("b").state is BatchState.DONE  # type: ignore[union-attr]
    assert ledger.get("b").counts == Counts(total=6, submitted=6, done=6, failed=0)  # type: ignore[union-attr]


def test_the_command_works_over_a_store_and_is_killed_in_the_middle(
    in_files: Folders, redis: Redis, redis_url: str, ledger: Ledger, wait_until: Callable[..., None]
) -> None:
    llama_block(in_files.root / "models" / "tiny")
    queue_prompts(40, "b", in_files, redis, ledger)
    first = start("faulty_worker.py", in_files, redis_url, "slow", "any", "run")
    wait_until(lambda: ledger.get("b").counts.done > 0, START_S)  # type: ignore[union-attr]
    first.kill()
    first.wait()
    left = 40 - ledger.get("b").counts.done  # type: ignore[union-attr]
    assert left > 0
    second = start("faulty_worker.py", in_files, redis_url, "none", "none", "run", "--burst")
    assert second.wait(timeout=START_S) == 0
    wait_until(lambda: ledger.get("b").state is BatchState.DONE)  # type: ignore[union-attr]
    assert published(in_files) == ids(40)
