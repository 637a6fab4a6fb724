"""What crashes and foreign hands leave behind is found, and repaired so that every row ends exactly once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job
from rq.registry import FailedJobRegistry

from contract import auditing, claimed, sealing
from contract.auditing import Auditor, Finding
from contract.ledger import BatchSpec, BatchState, Counts, Ledger, Mark
from contract.paths import Folders
from contract.queues import queue
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import batch_spec, completion_row, forget, lose, waiting_ids
from worker.intake import Intake


@pytest.fixture
def auditor(ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Auditor:
    """One that believes what it sees at once."""
    monkeypatch.setattr(auditing, "CONFIRM_S", 0.0)
    return Auditor(ledger, folders)


@pytest.fixture
def intake(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Intake:
    return Intake(redis, ledger, worker_settings(name="w"))


def demo(redis: Redis) -> Any:
    return queue(redis, "demo", "normal")


def kinds(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in findings]


def lost_rows(auditor: Auditor, **how: Any) -> list[tuple[int, ...]]:
    return [finding.rows for finding in auditor.look(**how) if finding.kind == "lost_rows"]


def repaired(auditor: Auditor) -> list[str]:
    return [auditor.repair(finding) for finding in auditor.look(thorough=True) if finding.repairable]


def age(folder: Path) -> None:
    for entry in [*folder.iterdir(), folder]:
        os.utime(entry, (0, 0))


def finish(intake: Intake, folders: Folders, room: int = 100) -> list[int]:
    rows = intake.take(room)
    with SegmentWriter(folders, "b", "w") as segment:
        segment.append([completion_row(row.index) for row in rows])
    intake.finish(rows)
    return [row.index for row in rows]


def test_a_system_in_which_rows_wait_run_and_are_scheduled_is_well(
    redis: Redis, claim: Callable[..., BatchSpec], intake: Intake, auditor: Auditor
) -> None:
    claim(6)
    rows = intake.take(3)
    redis.zrem(demo(redis).started_job_registry.key, rows[0].lease.member)
    redis.zadd(demo(redis).scheduled_job_registry.key, {"b-0": time.time() + 60})
    lose(redis, "b-3")
    redis.rpush(demo(redis).intermediate_queue.key, "b-3")
    assert auditor.look(thorough=True) == []


def test_a_job_in_no_list_is_put_back_once_and_keeps_its_attempts(
    redis: Redis, claim: Callable[..., BatchSpec], intake: Intake, auditor: Auditor, folders: Folders
) -> None:
    """As when a process dies between two steps of RQ's own retry."""
    claim(3)
    lose(redis, "b-1")
    redis.hset(Job.key_for("b-1"), mapping={"status": "scheduled", "meta": '{"attempts": 2}'})
    (finding,) = auditor.look()
    assert (finding.kind, finding.where, finding.rows) == ("lost_rows", "b", (1,))
    assert "1 jobs put back" in auditor.repair(finding)
    assert "0 jobs put back" in auditor.repair(finding)
    assert waiting_ids(redis) == ["b-1", "b-0", "b-2"]
    assert auditor.look() == []
    assert intake.take(1)[0].attempt == 3


def test_a_job_that_a_tool_put_among_the_failed_without_an_error_row_runs(
    redis: Redis, claim: Callable[..., BatchSpec], auditor: Auditor
) -> None:
    claim(1)
    lose(redis, "b-0")
    redis.hset(Job.key_for("b-0"), "status", "failed")
    redis.expire(Job.key_for("b-0"), 1000)
    redis.zadd(demo(redis).failed_job_registry.key, {"b-0": time.time() + 1000})
    repaired(auditor)
    assert waiting_ids(redis) == ["b-0"]
    assert FailedJobRegistry(queue=demo(redis)).get_job_ids() == []
    assert redis.hget(Job.key_for("b-0"), "status") == b"queued"
    assert redis.ttl(Job.key_for("b-0")) == -1


def test_rows_without_jobs_are_read_again_from_the_source(
    redis: Redis, claim: Callable[..., BatchSpec], intake: Intake, auditor: Auditor, folders: Folders, ledger: Ledger
) -> None:
    """As after `rq empty`."""
    claim(7)
    assert finish(intake, folders, 2) == [0, 1]
    forget(redis, *waiting_ids(redis))
    assert not list(redis.scan_iter("rq:job:b-*"))
    (done,) = repaired(auditor)
    assert done == "0 jobs put back, 5 read again from the source, 0 ended as errors"
    assert waiting_ids(redis) == [f"b-{index}" for index in range(2, 7)]
    rows = intake.take(9)
    assert [(row.job.id, row.job.prompt, row.job.line) for row in rows] == [
        (f"id-{index}", f"prompt {index}", index + 1) for index in range(2, 7)
    ]
    assert ledger.get("b").counts == Counts(total=7, submitted=7, done=2, failed=0)  # type: ignore[union-attr]


def test_rows_without_jobs_and_source_end_as_errors_that_say_so(
    redis: Redis, claim: Callable[..., BatchSpec], auditor: Auditor, folders: Folders, ledger: Ledger
) -> None:
    spec = claim(2)
    forget(redis, *waiting_ids(redis))
    claimed.source(spec, folders).unlink()
    (done,) = repaired(auditor)
    assert done == "0 jobs put back, 0 read again from the source, 2 ended as errors"
    assert ledger.get("b").state is BatchState.DONE  # type: ignore[union-attr]
    rows = [json.loads(line) for line in (folders.outputs / "b.errors.jsonl").read_text().splitlines()]
    assert [row["error"]["code"] for row in rows] == ["source_lost", "source_lost"]
    assert "in.jsonl does not hold it" in rows[0]["error"]["message"]


def test_rows_are_lost_only_when_they_were_seen_lost_before(
    redis: Redis, claim: Callable[..., BatchSpec], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("contract.auditing.time.monotonic", lambda: now)
    claim(2)
    lose(redis, "b-0")
    auditor = Auditor(ledger, folders)
    assert lost_rows(auditor) == []
    assert auditor.unsure
    now += auditing.CONFIRM_S / 2
    assert lost_rows(auditor) == []
    redis.rpush(demo(redis).key, "b-0")  # it was on its way
    assert lost_rows(auditor) == []
    assert not auditor.unsure
    lose(redis, "b-0")
    now += auditing.CONFIRM_S
    assert lost_rows(auditor) == []
    now += auditing.CONFIRM_S
    assert lost_rows(auditor) == [(0,)]


@pytest.mark.parametrize("where", ["waiting", "intermediate", "started", "scheduled", "done", "failed", "cancelled"])
def test_what_turns_up_before_the_repair_is_left_where_it_is(
    redis: Redis, ledger: Ledger, claim: Callable[..., BatchSpec], auditor: Auditor, where: str
) -> None:
    claim(1)
    target = demo(redis)
    lose(redis, "b-0")
    (finding,) = auditor.look()
    lists = {"waiting": target.key, "intermediate": target.intermediate_queue.key}
    sets = {"started": target.started_job_registry.key, "scheduled": target.scheduled_job_registry.key}
    if where in lists:
        redis.rpush(lists[where], "b-0")
    elif where in sets:
        redis.zadd(sets[where], {"b-0:1" if where == "started" else "b-0": time.time() + 60})
    else:
        redis.setbit(ledger.key("b", where), 0, 1)
    assert "0 jobs put back" in auditor.repair(finding)
    assert waiting_ids(redis) == (["b-0"] if where == "waiting" else [])


def test_a_quick_look_passes_over_queues_whose_numbers_are_right(
    redis: Redis, claim: Callable[..., BatchSpec], auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(3)
    with monkeypatch.context() as watched:
        watched.setattr("contract.auditing.job_ids", lambda *_: pytest.fail("looked through the queue"))
        assert lost_rows(auditor) == []
    lose(redis, "b-1")
    redis.rpush(demo(redis).key, "stranger")
    assert lost_rows(auditor, thorough=True) == [(1,)]


def test_many_rows_are_found_in_long_lists(
    redis: Redis, claim: Callable[..., BatchSpec], auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contract.queues.SCAN", 10)
    claim(1234)
    gone = [0, 9, 10, 11, 500, 1233]
    for index in gone:
        lose(redis, f"b-{index}")
    assert lost_rows(auditor) == [tuple(gone)]
    repaired(auditor)
    assert sorted(int(job_id[2:]) for job_id in waiting_ids(redis)) == list(range(1234))


def test_a_complete_batch_that_nobody_published_is_published(
    redis: Redis, ledger: Ledger, claim: Callable[..., BatchSpec], intake: Intake, auditor: Auditor, folders: Folders
) -> None:
    claim(1)
    finish(intake, folders)
    with ledger.lock("b", "seal"):
        assert auditor.look() == []  # somebody is at it
    assert kinds(auditor.look()) == [("unsealed", "b")]
    assert repaired(auditor) == ["published"]
    assert (folders.outputs / "b.jsonl").exists()


def test_a_cancelling_that_died_is_carried_on(
    ledger: Ledger, claim: Callable[..., BatchSpec], auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(2)
    assert ledger.stop("b")
    assert auditor.look(thorough=True) == []  # whoever began is at it
    monkeypatch.setattr(auditing, "CANCEL_IDLE_S", 0.0)
    assert kinds(auditor.look(thorough=True)) == [("unfinished_cancel", "b")]
    assert repaired(auditor) == ["2 rows cancelled"]
    assert ledger.bitmap("b", Mark.CANCELLED)
    assert auditor.look(thorough=True) == []


def test_a_claimed_source_that_the_ledger_does_not_know_is_recorded(
    redis: Redis, ledger: Ledger, folders: Folders, auditor: Auditor
) -> None:
    spec = batch_spec()
    claimed.write_manifest(spec, folders)
    age(folders.claimed / "b")
    assert auditor.look() == []  # no source yet: the claim never came to be
    claimed.source(spec, folders).write_text("{}\n")
    assert auditor.look() == []  # it may be on its way
    age(folders.claimed / "b")
    assert kinds(auditor.look()) == [("unrecorded_claim", str(folders.claimed / "b"))]
    assert len(repaired(auditor)) == 1
    batch = ledger.get("b")
    assert batch is not None
    assert (batch.spec, batch.state) == (spec, BatchState.SUBMITTING)
    assert auditor.look() == []


def test_a_claim_that_tells_nothing_is_for_a_person(folders: Folders, auditor: Auditor) -> None:
    odd = folders.claimed / "odd"
    odd.mkdir()
    (odd / "batch.json").write_text("{}")
    age(odd)
    (finding,) = auditor.look()
    assert (finding.kind, finding.where, finding.repairable) == ("unreadable_claim", str(odd), False)


def test_a_source_that_is_gone_while_it_is_read_is_for_a_person(
    ledger: Ledger, folders: Folders, auditor: Auditor
) -> None:
    ledger.create(batch_spec())
    (finding,) = auditor.look()
    assert (finding.kind, finding.where, finding.repairable) == ("missing_source", "b", False)


def test_segments_of_nobody_are_put_aside_and_those_of_somebody_stay(
    ledger: Ledger, folders: Folders, auditor: Auditor, claim: Callable[..., BatchSpec]
) -> None:
    claim(1)
    for batch in ("b", "nobody", "young", "claimed"):
        with SegmentWriter(folders, batch, "w") as segment:
            segment.append([completion_row(0)])
        if batch != "young":
            age(folders.segments / batch)
    (folders.claimed / "claimed").mkdir()
    assert kinds(auditor.look()) == [("orphan_segments", str(folders.segments / "nobody"))]
    repaired(auditor)
    assert (folders.orphans / "nobody" / "w.jsonl").exists()
    assert sorted(folder.name for folder in folders.segments.iterdir()) == ["b", "claimed", "young"]
    (folders.segments / "nobody").mkdir()
    age(folders.segments / "nobody")
    repaired(auditor)
    assert len(list(folders.orphans.iterdir())) == 2


def test_a_batch_restored_twice_by_two_who_look_at_once_is_queued_once(
    redis: Redis, claim: Callable[..., BatchSpec], ledger: Ledger, folders: Folders, auditor: Auditor, intake: Intake
) -> None:
    claim(4)
    forget(redis, *waiting_ids(redis))
    other = Auditor(ledger, folders)
    (first,), (second,) = auditor.look(), other.look()
    auditor.repair(first)
    other.repair(second)
    assert waiting_ids(redis) == ["b-0", "b-1", "b-2", "b-3"]
    assert finish(intake, folders) == [0, 1, 2, 3]
    assert sealing.seal("b", ledger, folders)
