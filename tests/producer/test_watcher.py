"""A watching producer as it runs, on a folder that people use."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from contract.jobs import PromptJob
from contract.ledger import BatchState, Ledger, Mark
from contract.paths import Folders
from contract.settings import ProducerSettings
from producer import rounds
from producer.claims import Claims, Look
from producer.watcher import Watcher
from tests.producer.conftest import PRODUCER, Faulty, submitted

Watching = Callable[..., Any]
Wait = Callable[..., None]
Queued = Callable[..., list[PromptJob]]


def test_a_dropped_file_is_submitted(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    with watching():
        (folders.inputs / "a.txt").write_text("one\ntwo\n")
        wait_until(submitted(ledger, 1))
    assert [job.prompt for job in queued()] == ["one", "two"]
    assert not (folders.inputs / "a.txt").exists()


def test_a_dropped_file_has_the_hours_of_the_settings(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching(not_before="+2h", window="22:00-06:00"):
        (folders.inputs / "a.txt").write_text("one\ntwo\n")
        wait_until(submitted(ledger, 1))
    spec = ledger.newest()[0].spec
    assert spec.hours is not None
    assert (spec.hours.not_before, spec.hours.window) == (spec.created_at + 7200, "22:00-06:00")


def test_an_event_wakes_it_long_before_the_next_scan(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching(scan_s=600) as watcher:
        wait_until(lambda: watcher._hints._observer is not None and not watcher._wake.is_set())
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))


def test_scans_find_files_without_any_event(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.hints.Hints.check", lambda self: None)
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))


def test_a_slow_copy_is_one_batch_with_every_row(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    with watching(settle_s=1.0, scan_s=0.05), (folders.inputs / "slow.txt").open("w") as stream:
        for number in range(40):
            stream.write(f"line {number}\n")
            stream.flush()
            threading.Event().wait(0.03)
        assert ledger.newest() == []
        stream.close()
        wait_until(submitted(ledger, 1))
    assert [job.prompt for job in queued()] == [f"line {number}" for number in range(40)]


def test_a_file_renamed_into_place_is_submitted_under_its_last_name(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching():
        (folders.inputs / "a.txt.part").write_text("one\n")
        (folders.inputs / "a.txt.part").rename(folders.inputs / "a.txt")
        wait_until(submitted(ledger, 1))
    assert ledger.newest()[0].spec.source == "a.txt"


def test_two_hundred_files_at_once_are_two_hundred_batches(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    with watching():
        for number in range(200):
            (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
        wait_until(submitted(ledger, 200))
    assert sorted(int(job.prompt or "") for job in queued()) == list(range(200))


def test_more_files_than_are_submitted_in_turn_need_one_scan_only(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.hints.Hints.check", lambda self: None)
    for number in range(rounds.ACTIVE * 3):
        (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
    with watching(scan_s=600):
        wait_until(submitted(ledger, rounds.ACTIVE * 3))


def test_an_inbox_that_is_deleted_is_made_again_and_watched(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))
        shutil.rmtree(folders.inputs)
        wait_until(folders.claimed.exists)
        (folders.inputs / "b.txt").write_text("two\n")
        wait_until(submitted(ledger, 2))


def test_a_long_file_does_not_keep_a_short_one_waiting(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching(max_queued=10):
        (folders.inputs / "long.txt").write_text("line\n" * 100)
        wait_until(lambda: any(batch.counts.submitted == 10 for batch in ledger.newest()))
        (folders.inputs / "short.txt").write_text("line\n")
        wait_until(lambda: any(batch.state is BatchState.RUNNING for batch in ledger.newest()))
    states = {batch.spec.source: batch.state for batch in ledger.newest()}
    assert states == {"long.txt": BatchState.SUBMITTING, "short.txt": BatchState.RUNNING}


def test_a_restart_goes_on_where_the_last_one_stopped(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    (folders.inputs / "a.txt").write_text("".join(f"line {number}\n" for number in range(95)))
    with watching(max_queued=40):
        wait_until(lambda: any(batch.counts.submitted == 40 for batch in ledger.newest()))
    assert len(queued()) == 40
    with watching(max_queued=1000):
        wait_until(submitted(ledger, 1))
    assert [job.prompt for job in queued()] == [f"line {number}" for number in range(95)]


def test_a_killed_watcher_is_continued_by_the_next_one(
    watching: Watching,
    redis: Redis,
    redis_url: str,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    queued: Queued,
) -> None:
    command = [*PRODUCER, "watch", "--root", str(folders.root), "--redis-url", redis_url]
    environment = {**os.environ, "DLLM_MAX_QUEUED": "100000", "DLLM_SETTLE_S": "0", "DLLM_SCAN_S": "0.05"}
    (folders.inputs / "a.txt").write_text("".join(f"line {number}\n" for number in range(6000)))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as dying:
        wait_until(lambda: any(batch.counts.submitted for batch in ledger.newest()))
        dying.kill()
    (batch,) = ledger.newest()
    assert batch.state is BatchState.SUBMITTING
    redis.delete(ledger.key(batch.spec.batch, "lock:submit"))  # it would run out by itself
    with watching(max_queued=100_000):
        wait_until(submitted(ledger, 1))
    assert [job.index for job in queued()] == list(range(6000))


def test_two_watchers_on_one_folder_submit_every_file_once(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    with watching(), watching():
        for number in range(40):
            (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
        wait_until(submitted(ledger, 40))
    assert sorted(int(job.prompt or "") for job in queued()) == list(range(40))


def test_a_file_that_cannot_be_claimed_now_is_claimed_later(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    notices: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, full = os.rename, threading.Event()
    full.set()

    def rename(source: Path, target: Path) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr("producer.claims.os.rename", rename)
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(lambda: any("No space left" in notice.get("reason", "") for notice in notices))
        full.clear()
        wait_until(submitted(ledger, 1))
    assert sum("No space left" in notice.get("reason", "") for notice in notices) == 1


def test_once_outlasts_an_outage(
    folders: Folders,
    redis: Redis,
    producer_settings: Callable[..., ProducerSettings],
    queued: Queued,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("producer.submitter.LONGEST_PAUSE_S", 0.01)
    for number in range(rounds.ACTIVE + 4):
        (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
    ledger = Faulty(redis, before=(3, 9), after=(5,))
    Watcher(producer_settings(), ledger, lambda: False).run_once()
    assert sorted(int(job.prompt or "") for job in queued()) == list(range(rounds.ACTIVE + 4))


def test_once_submits_all_that_is_ready_and_all_that_was_left_over(
    folders: Folders, ledger: Ledger, producer_settings: Callable[..., ProducerSettings], queued: Queued
) -> None:
    for number in range(rounds.ACTIVE + 4):
        (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
    Watcher(producer_settings(settle_s=0.1), ledger, lambda: False).run_once()
    assert len(queued()) == rounds.ACTIVE + 4
    assert list(folders.inputs.glob("*.txt")) == []


def test_once_tells_which_batches_it_left_to_another_producer(
    folders: Folders,
    ledger: Ledger,
    producer_settings: Callable[..., ProducerSettings],
    notices: list[dict[str, Any]],
) -> None:
    (folders.inputs / "a.txt").write_text("one\n")
    settings = producer_settings()
    spec = Claims(settings, ledger).take(folders.inputs / "a.txt", Look.at(folders.inputs / "a.txt"))
    assert spec is not None
    assert ledger.lock(spec.batch, "submit").acquire()
    Watcher(settings, ledger, lambda: False).run_once()
    (notice,) = (notice for notice in notices if notice["log_level"] == "warning")
    assert notice["event"] == "not_submitted_to_its_end"
    assert "another producer has it" in notice["reason"]


def test_a_short_batch_does_not_wait_for_long_ones_that_have_no_room(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    queued: Queued,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "ACTIVE", 2)
    with watching(max_queued=10):
        for number in range(3):
            (folders.inputs / f"long-{number}.jsonl").write_text('{"prompt": "long"}\n' * 50)
        wait_until(lambda: [batch.counts.submitted for batch in ledger.newest()] == [10, 10, 10])
        (folders.inputs / "short.txt").write_text("one\ntwo\n")
        wait_until(lambda: [batch.state for batch in ledger.newest()].count(BatchState.RUNNING) == 1)
        for batch in ledger.newest():  # the workers take what stands in Redis
            for index in range(10):
                ledger.redis.setbit(ledger.key(batch.spec.batch, Mark.DONE), index, 1)
        wait_until(lambda: sum(batch.counts.submitted for batch in ledger.newest()) == 62)
    for name in ("long-0", "long-1", "long-2"):
        batch = next(batch.spec.batch for batch in ledger.newest() if batch.spec.output == name)
        assert [job.index for job in queued() if job.batch == batch] == list(range(20))
