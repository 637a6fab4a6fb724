"""Submitting: every row reaches the queue once, whatever happens to the producer, and never too many at a time."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from rq import Queue, Retry

from contract import sealing, segments
from contract.jobs import ErrorRow, Message, PromptJob
from contract.ledger import BatchSpec, BatchState, Cursor, Ledger, Mark
from contract.parser import parse
from contract.paths import Folders
from contract.queues import FAILURE_TTL_S, RETRIES, TASK, enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings
from producer.claims import Claims
from producer.submitter import CHUNK_ROWS, Progress, Submission, submit
from tests.conftest import batch_spec, waiting_ids
from tests.producer.conftest import PRODUCER, Faulty

Settings = Callable[..., ProducerSettings]
Submitted = Callable[..., tuple[BatchSpec, list[ErrorRow]]]
Queued = Callable[..., list[PromptJob]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.submitter.POLL_S", 0.01)
    monkeypatch.setattr("producer.submitter.LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    """A .jsonl of `count` rows; every `bad`-th line is not JSON."""

    def write(count: int, bad: int = 0, name: str = "own.jsonl") -> Path:
        def line(index: int) -> str:
            return "{" if bad and index % bad == 0 else json.dumps({"id": f"i{index}", "prompt": f"prompt {index}"})

        (tmp_path / name).write_text("".join(f"{line(index)}\n" for index in range(count)))
        return tmp_path / name

    return write


def end_rows(ledger: Ledger, spec: BatchSpec, indices: Iterator[int] | range) -> None:
    with ledger.redis.pipeline() as pipe:
        for index in indices:
            ledger.mark(pipe, spec.batch, index, Mark.DONE)
        pipe.execute()


def test_every_row_is_queued_once_in_order(submit_file: Submitted, queued: Queued, source: Any, ledger: Ledger) -> None:
    count = CHUNK_ROWS * 2 + 10
    spec, errors = submit_file(source(count))
    jobs = queued()
    assert [job.index for job in jobs] == list(range(count))
    assert [job.prompt for job in jobs[:2]] == ["prompt 0", "prompt 1"]
    assert errors == []
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert (batch.state, batch.counts.total, batch.counts.submitted) == (BatchState.RUNNING, count, count)


def test_a_file_of_just_whole_chunks_ends(submit_file: Submitted, source: Any, ledger: Ledger) -> None:
    spec, _ = submit_file(source(CHUNK_ROWS))
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert batch.counts.total == CHUNK_ROWS


def test_the_users_own_file_stays_as_it_is(submit_file: Submitted, source: Any) -> None:
    file = source(3)
    before = (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino)
    submit_file(file)
    assert (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino) == before


def test_what_happens_to_the_users_file_afterwards_does_not_matter(
    ledger: Ledger, producer_settings: Settings, source: Any, queued: Queued
) -> None:
    file, settings = source(3), producer_settings()
    spec = Claims(settings, ledger).snapshot(file)
    file.write_text('{"prompt": "another"}\n')
    assert submit(spec, ledger, settings)
    assert [job.prompt for job in queued()] == ["prompt 0", "prompt 1", "prompt 2"]


def test_a_batch_without_one_readable_row_is_published_at_once(
    submit_file: Submitted, source: Any, ledger: Ledger, folders: Folders
) -> None:
    spec, errors = submit_file(source(3, bad=1))
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert batch.state is BatchState.DONE
    assert len(errors) == 3
    assert (folders.outputs / "own.jsonl").read_text() == ""
    assert len((folders.outputs / "own.errors.jsonl").read_text().splitlines()) == 3
    assert (folders.processed / "own.jsonl").exists()


def test_queued_jobs_are_what_rq_itself_would_write(redis: Redis) -> None:
    prompts = [
        PromptJob(batch="b", index=0, line=1, id="\u00fc", prompt='"\U0001f600"\n', submitted_at=1.5),
        PromptJob(batch="b", index=1, line=2, id="x", messages=(TURN,), params=SamplingParams(seed=3), submitted_at=2),
    ]
    target = queue(redis, "demo", "normal")
    by_rq = [
        Queue.prepare_data(
            TASK,
            args=(prompt.model_dump(mode="json", exclude_defaults=True),),
            job_id=prompt.job_id,
            description=f"b row {prompt.index}",
            result_ttl=0,
            failure_ttl=FAILURE_TTL_S,
            timeout=-1,
            retry=Retry(max=RETRIES),
        )
        for prompt in prompts
    ]
    target.enqueue_many(by_rq)
    wanted = stored(target, target.job_ids)
    redis.flushall()
    with redis.pipeline() as pipe:
        enqueuing(target, prompts)(pipe)
        pipe.execute()
    assert stored(target, waiting_ids(redis)) == wanted
    assert Queue.all(connection=redis, serializer=target.serializer) == [target]


TURN = Message(role="user", content="hi")


def stored(target: Queue, job_ids: list[str]) -> list[tuple[object, ...]]:
    """Everything about jobs but when they were made."""
    timeless = ("created_at", "enqueued_at", "data")
    return [
        (job.id, job.func_name, job.args, job.kwargs, {k: v for k, v in job.to_dict().items() if k not in timeless})
        for job in map(target.fetch_job, job_ids)
        if job
    ]


# Room


def test_no_more_rows_stand_in_redis_than_max_queued(
    ledger: Ledger, producer_settings: Settings, source: Any, queued: Queued
) -> None:
    settings = producer_settings(max_queued=100)
    spec = Claims(settings, ledger).snapshot(source(350))
    submission, ended, most = Submission(spec, ledger, settings), 0, 0
    while (progress := submission.step()) is not Progress.FINISHED:
        batch = ledger.get(spec.batch)
        assert batch is not None
        most = max(most, batch.counts.submitted - ended)
        if progress is Progress.FULL:
            end_rows(ledger, spec, range(ended, batch.counts.submitted))
            ended = batch.counts.submitted
    assert most == 100
    assert [job.index for job in queued()] == list(range(350))


def test_prompts_in_redis_are_limited_in_bytes_too(
    ledger: Ledger, producer_settings: Settings, tmp_path: Path, queued: Queued
) -> None:
    (tmp_path / "fat.txt").write_text(("x" * 100_000 + "\n") * 30)
    settings = producer_settings(max_queued_mb=1)
    spec = Claims(settings, ledger).snapshot(tmp_path / "fat.txt")
    submission = Submission(spec, ledger, settings)
    while submission.step() is Progress.ADVANCED:
        pass
    assert 5 <= len(queued()) <= 12
    submission.close()


def test_waiting_for_room_ends_when_told_to_stop(ledger: Ledger, producer_settings: Settings, source: Any) -> None:
    settings, stopped = producer_settings(max_queued=10), threading.Event()
    spec = Claims(settings, ledger).snapshot(source(50))

    def full(_: Cursor, progress: Progress) -> None:
        if progress is Progress.FULL:
            stopped.set()

    assert not submit(spec, ledger, settings, full, stopped.is_set)
    assert not ledger.lock(spec.batch, "submit").locked()


def test_reading_holds_one_line_however_long_the_file(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text("".join(f'{{"id": "i{index}", "prompt": "prompt {index}"}}\n' for index in range(6_000)))
    with file.open("rb") as stream:
        tracemalloc.start()
        count = sum(1 for _ in parse(stream, batch_spec(), Cursor(), 1 << 20))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert count == 6_000
    assert peak < 1 << 20


def test_submitting_holds_one_chunk_however_large_the_file(
    ledger: Ledger, producer_settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "fat.txt").write_text(("x" * 200_000 + "\n") * 100)
    settings = producer_settings(max_queued_mb=100)
    spec = Claims(settings, ledger).snapshot(tmp_path / "fat.txt")
    tracemalloc.start()
    assert submit(spec, ledger, settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20  # the file is 20 MB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory as Linux tells it")
def test_a_large_file_waits_for_workers_in_little_memory_of_producer_and_server(
    redis: Redis, redis_url: str, ledger: Ledger, folders: Folders, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """200,000 rows, the settings as they are, and no worker."""
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(f'{{"id": "i{index}", "prompt": "{"some words " * 10}{index}"}}\n' for index in range(200_000))
    before = redis.info("memory")["used_memory"]
    most = ProducerSettings.model_fields["max_queued"].default
    command = [*PRODUCER, "submit", str(tmp_path / "large.jsonl"), "--root", str(folders.root)]
    with subprocess.Popen([*command, "--redis-url", redis_url], stdout=subprocess.DEVNULL) as producer:
        try:
            wait_until(lambda: any(batch.counts.submitted >= most for batch in ledger.newest()), 60)
            status = Path(f"/proc/{producer.pid}/status").read_text()
            assert producer.poll() is None
        finally:
            producer.kill()
    (batch,) = ledger.newest()
    assert batch.counts.submitted == most
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 200 << 20
    assert redis.info("memory")["used_memory"] - before < 100 << 20


# Deaths and outages


@pytest.mark.parametrize("faults", [{"before": (0,)}, {"before": (1, 2)}, {"after": (0, 1)}, {"after": (2,)}])
def test_an_outage_loses_and_repeats_nothing(
    redis: Redis, producer_settings: Settings, source: Any, queued: Queued, folders: Folders, faults: dict[str, Any]
) -> None:
    count, settings, ledger = CHUNK_ROWS * 2 + 50, producer_settings(), Faulty(redis, **faults)
    spec = Claims(settings, ledger).snapshot(source(count, bad=100))
    assert submit(spec, ledger, settings)
    errors = list(sealing.errors(spec.batch, ledger, folders))
    assert [row.index for row in errors] == list(range(0, count, 100))
    assert [job.index for job in queued()] == [index for index in range(count) if index % 100]


def test_unreadable_rows_are_on_the_disk_before_the_ledger_counts_them(
    redis: Redis, producer_settings: Settings, source: Any, folders: Folders
) -> None:
    settings, ledger = producer_settings(), Faulty(redis, before=(0,))
    spec = Claims(settings, ledger).snapshot(source(4, bad=2))
    submission = Submission(spec, ledger, settings)
    with pytest.raises(RedisConnectionError):
        submission.step()
    submission.close()
    (segment,) = segments.files(folders.segments / spec.batch)
    assert [row.index for row in segments.rows(segment)] == [0, 2]
    assert ledger.bitmap(spec.batch, Mark.FAILED) == b""


def test_a_ledger_that_lost_everything_is_filled_again(
    redis: Redis, ledger: Ledger, producer_settings: Settings, source: Any, queued: Queued
) -> None:
    settings = producer_settings()
    spec = Claims(settings, ledger).snapshot(source(20))
    redis.flushall()
    assert submit(spec, ledger, settings)
    assert [job.index for job in queued()] == list(range(20))


def test_two_producers_share_a_batch_without_repeating_a_row(
    redis: Redis, producer_settings: Settings, source: Any, queued: Queued
) -> None:
    settings, count = producer_settings(), CHUNK_ROWS * 4
    spec = Claims(settings, Ledger(redis)).snapshot(source(count))
    ended: list[bool] = []
    threads = [
        threading.Thread(target=lambda: ended.append(submit(spec, Ledger(redis), settings)), daemon=True)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ended == [True, True]
    assert [job.index for job in queued()] == list(range(count))


def test_a_producer_whose_cursor_was_moved_by_another_queues_nothing(
    redis: Redis, ledger: Ledger, producer_settings: Settings, source: Any, queued: Queued
) -> None:
    settings = producer_settings()
    spec = Claims(settings, ledger).snapshot(source(CHUNK_ROWS * 2))
    submission = Submission(spec, ledger, settings)
    assert submission.step() is Progress.ADVANCED
    redis.set(ledger.key(spec.batch, "cursor"), Cursor(offset=1, line=1, index=1).model_dump_json())
    assert submission.step() is Progress.LET_GO
    assert len(queued()) == CHUNK_ROWS


@pytest.mark.parametrize("rows_before_the_kill", [1, CHUNK_ROWS * 3])
def test_a_killed_producer_is_continued_without_a_row_lost_or_repeated(
    redis: Redis,
    redis_url: str,
    ledger: Ledger,
    folders: Folders,
    producer_settings: Settings,
    source: Any,
    queued: Queued,
    wait_until: Callable[..., None],
    rows_before_the_kill: int,
) -> None:
    count = CHUNK_ROWS * 12
    file = source(count, bad=50)
    content = file.read_bytes()
    command = [*PRODUCER, "submit", str(file), "--root", str(folders.root), "--redis-url", redis_url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "DLLM_MAX_QUEUED": "100000"}) as dying:
        wait_until(lambda: any(batch.counts.submitted >= rows_before_the_kill for batch in ledger.newest()))
        dying.send_signal(signal.SIGKILL)
    (batch,) = ledger.newest()
    assert batch.state is BatchState.SUBMITTING
    assert 0 < batch.counts.submitted < count
    redis.delete(ledger.key(batch.spec.batch, "lock:submit"))  # it would run out by itself

    settings = producer_settings(max_queued=100_000)
    (pending,) = Claims(settings, ledger).pending()
    assert submit(pending, ledger, settings)
    assert [job.index for job in queued()] == [index for index in range(count) if index % 50]
    errors = list(sealing.errors(pending.batch, ledger, folders))
    assert [row.index for row in errors] == list(range(0, count, 50))
    assert file.read_bytes() == content


def test_a_batch_may_be_stopped_between_any_two_lines() -> None:
    class Told(Exception):
        pass

    def tick() -> None:
        raise Told

    with pytest.raises(Told):
        next(parse(io.BytesIO(b"\n\n\n\n"), batch_spec(), Cursor(), 100, tick))
