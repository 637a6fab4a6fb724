"""Every worker looks after the queues; one at a time looks for what is lost, and another follows when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from redis import Redis

from contract import auditing
from contract.errors import PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import BatchSpec, BatchState, Ledger
from contract.paths import Folders
from contract.queues import job_ids, queue, standing
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import completion_row, forget, lose, waiting_ids
from worker.intake import Intake
from worker.reconciler import Reconciler

LEADER = """
import sys, time
from contract.ledger import Ledger
from contract.queues import connect
from contract.settings import WorkerSettings
from worker.reconciler import Reconciler

root, url = sys.argv[1:]
redis = connect(url)
leader = Reconciler(redis, Ledger(redis), WorkerSettings(root=root, redis_url=url, scan_s=0.1), "leader")
leader.run()
print("leads", leader._leads(), flush=True)
while True:
    time.sleep(0.1)
    leader.run()
"""


CANCELLER = """
import os, signal, sys
from pathlib import Path
from contract import cancelling
from contract.ledger import Ledger
from contract.paths import Folders
from contract.queues import connect

root, url = sys.argv[1:]
withdraw = cancelling.withdraw

def withdraw_and_die(*args):
    withdraw(*args)
    os.kill(os.getpid(), signal.SIGKILL)

cancelling.CHUNK, cancelling.withdraw = 1, withdraw_and_die
cancelling.cancel("b", Ledger(connect(url)), Folders(Path(root)))
"""


@pytest.fixture
def reconciler(
    redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Reconciler]:
    """Make reconcilers that believe what they see at once."""
    monkeypatch.setattr(auditing, "CONFIRM_S", 0.0)
    monkeypatch.setattr(auditing, "CANCEL_IDLE_S", 0.0)
    return lambda name: Reconciler(redis, ledger, worker_settings(scan_s=10.0), name)


def test_only_the_leader_audits(
    redis: Redis, submit: Callable[..., str], reconciler: Callable[[str], Reconciler]
) -> None:
    submit(2)
    first, second = reconciler("first"), reconciler("second")
    first.run()
    lose(redis, "b-0")
    second.run()
    assert waiting_ids(redis) == ["b-1"]
    first.run()
    assert waiting_ids(redis) == ["b-0", "b-1"]


def test_a_prompt_that_has_not_ended_stands_where_the_audit_looks_whatever_a_worker_does_with_it(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], worker_settings: Callable[..., WorkerSettings]
) -> None:
    submit(1)
    target = queue(redis, "demo", "normal")
    intake = Intake(redis, ledger, worker_settings(name="w", retry_base_s=1000, retry_max_s=1000))

    def stands() -> bool:
        return standing(redis, target, ["b"]) == 1 and list(job_ids(redis, target, ["b"])) == ["b-0"]

    assert stands()
    (row,) = intake.take(1)
    assert stands()
    assert intake.give_back([row]) == 1
    assert stands()
    (row,) = intake.take(1)
    assert intake.retry(row, PromptFailure(ErrorCode.MODEL_ERROR, "again"))
    assert stands()
    redis.zadd(target.scheduled_job_registry.key, {"b-0": 1})
    (row,) = intake.take(1)
    redis.zadd(target.started_job_registry.key, {row.lease.member: 1})
    intake.reconciler.run()
    assert stands()
    (row,) = intake.take(1)
    assert intake.finish([row]) == 1
    assert standing(redis, target, ["b"]) == 0


def test_the_lock_of_a_killed_leader_runs_out(
    redis: Redis,
    redis_url: str,
    folders: Folders,
    submit: Callable[..., str],
    reconciler: Callable[[str], Reconciler],
    wait_until: Callable[..., None],
) -> None:
    submit(2)
    command = [sys.executable, "-c", LEADER, str(folders.root), redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "leads True\n"
            follower = reconciler("follower")
            assert not follower._leads()
        finally:
            process.send_signal(signal.SIGKILL)
    lose(redis, "b-0")
    wait_until(lambda: follower.run() or waiting_ids(redis) == ["b-0", "b-1"])


def test_a_leader_that_stood_still_does_not_lead_beside_its_follower(
    redis: Redis, reconciler: Callable[[str], Reconciler]
) -> None:
    first, second = reconciler("first"), reconciler("second")
    assert first._leads()
    assert redis.delete("dllm:lock:audit") == 1  # it ran out
    assert second._leads()
    assert not first._leads()
    assert second._leads()


def test_what_is_found_is_repaired_and_logged_and_what_is_for_a_person_is_logged_once(
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    submit: Callable[..., str],
    reconciler: Callable[[str], Reconciler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auditing, "CLAIM_IDLE_S", 0.0)
    submit(2)
    lose(redis, "b-1")
    odd = folders.claimed / "odd"
    odd.mkdir()
    (odd / "batch.json").write_text("{}")
    segment(folders, "nobody")
    one = reconciler("w")
    with structlog.testing.capture_logs() as events:
        one.run()
        one.run()
    told = [(event["event"], event["kind"], event["where"]) for event in events if "kind" in event]
    assert told == [
        ("found_and_repaired", "lost_rows", "b"),
        ("found_for_a_person", "unreadable_claim", str(odd)),
        ("found_and_repaired", "orphan_segments", str(folders.segments / "nobody")),
    ]
    assert waiting_ids(redis) == ["b-1", "b-0"]


def segment(folders: Folders, batch: str) -> None:
    with SegmentWriter(folders, batch, "w") as writer:
        writer.append([completion_row(0)])
    for entry in [folders.segments / batch / "w.jsonl", folders.segments / batch]:
        os.utime(entry, (0, 0))


def test_a_repair_that_fails_does_not_keep_the_others_from_being_made(
    redis: Redis, folders: Folders, submit: Callable[..., str], reconciler: Callable[[str], Reconciler]
) -> None:
    submit(1)
    lose(redis, "b-0")
    for batch in ("nobody", "neither"):
        segment(folders, batch)
    folders.orphans.write_text("a file where the folder should be")
    one = reconciler("w")
    with structlog.testing.capture_logs() as events:
        one.run()
    assert waiting_ids(redis) == ["b-0"]
    failed = [event for event in events if event["event"] == "repair_failed"]
    assert [Path(event["where"]).name for event in failed] == ["neither", "nobody"]


def test_a_cancelling_whose_process_was_killed_is_carried_on(
    redis_url: str,
    ledger: Ledger,
    folders: Folders,
    submit: Callable[..., str],
    reconciler: Callable[[str], Reconciler],
) -> None:
    submit(3)
    command = [sys.executable, "-c", CANCELLER, str(folders.root), redis_url]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    batch = ledger.get("b")
    assert batch is not None
    assert (batch.state, batch.counts.cancelled) == (BatchState.RUNNING, 1)
    reconciler("w").run()
    batch = ledger.get("b")
    assert batch is not None
    assert (batch.state, batch.counts.cancelled) == (BatchState.DONE, 3)
    rows = [json.loads(line) for line in (folders.outputs / "b.errors.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["id-0", "id-1", "id-2"]


def test_an_emptied_queue_is_filled_again_by_a_worker_that_lives(
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    claim: Callable[..., BatchSpec],
) -> None:
    """With the real heartbeat and maintenance threads, and after `rq empty` by hand."""
    monkeypatch.setattr(auditing, "CONFIRM_S", 0.1)
    batch = claim(5).batch
    forget(redis, *waiting_ids(redis))
    with Intake(redis, ledger, worker_settings(name="w")) as intake:
        taken: dict[int, Any] = {}
        wait_until(lambda: taken.update({row.index: row for row in intake.take(8)}) or len(taken) == 5)
        with SegmentWriter(folders, batch, "w") as writer:
            writer.append([completion_row(index) for index in taken])
        assert intake.finish(list(taken.values())) == 5
        wait_until(lambda: ledger.get(batch).state is BatchState.DONE)  # type: ignore[union-attr]
