"""`producer doctor`: a line for each thing that is wrong, what --fix does about it, and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from redis import Redis

from contract import auditing, checkup
from contract.ledger import Ledger
from contract.paths import Folders
from contract.settings import WorkerSettings
from producer import doctor
from tests.conftest import lose, waiting_ids
from worker.intake import Intake

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "CONFIRM_S", 0.01)
    monkeypatch.setattr(doctor, "CONFIRM_S", 0.02)
    monkeypatch.setattr(checkup, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(checkup, "LEAST_FREE_SHARE", 0.0)
    monkeypatch.setattr(checkup, "persistence", lambda _: None)  # the tests' server keeps nothing


def findings(run: Run, *flags: str) -> list[dict[str, object]]:
    result = run("doctor", "--json", *flags)
    document = json.loads(result.stdout)
    assert document["healthy"] == (result.exit_code == 0)
    found: list[dict[str, object]] = document["findings"]
    return found


def test_all_is_well_on_an_empty_system(run: Run) -> None:
    result = run("doctor")
    assert (result.exit_code, result.stdout) == (0, "all is well\n")
    assert findings(run) == []


def test_rows_that_wait_for_a_worker_that_is_not_there(
    run: Run, submit: Callable[..., str], redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> None:
    submit(3)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout == (
        "no_worker  demo: 3 rows have not ended, and no worker is alive; to do: start `worker run --model demo`\n"
    )
    with Intake(redis, ledger, worker_settings(name="w", scan_s=60)):
        assert run("doctor").exit_code == 0


def test_what_can_be_repaired_is_told_first_and_repaired_when_asked_for(
    run: Run,
    submit: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_workers", lambda _: iter(()))
    submit(3)
    lose(redis, "b-1")
    told = run("doctor")
    assert told.exit_code == 1
    assert told.stdout == "lost_rows  b: 1 row (1) stand in no queue and have not ended; --fix queues them again\n"
    assert waiting_ids(redis) == ["b-0", "b-2"]
    fixed = run("doctor", "--fix")
    assert fixed.exit_code == 0
    assert "fixed: 1 jobs put back" in fixed.stdout
    assert waiting_ids(redis) == ["b-1", "b-0", "b-2"]
    assert findings(run) == []


def test_what_is_for_a_person_is_not_fixed(run: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "CLAIM_IDLE_S", 0.0)
    odd = folders.claimed / "odd"
    odd.mkdir()
    (odd / "batch.json").write_text("{}")
    (found,) = findings(run, "--fix")
    assert (found["kind"], found["where"], found["fixable"], found["done"]) == (
        "unreadable_claim",
        str(odd),
        False,
        None,
    )


def test_a_repair_that_does_not_succeed_is_told_with_the_reason(
    run: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "ORPHAN_IDLE_S", -1.0)
    (folders.segments / "nobody").mkdir()
    folders.orphans.write_text("a file where the folder should be")
    (found,) = findings(run, "--fix")
    assert found["done"] is None
    assert "File exists" in str(found["refused"])
    assert "not fixed: " in run("doctor", "--fix").stdout


def test_a_server_that_evicts_is_told(run: Run, redis: Redis) -> None:
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (found,) = findings(run)
    finally:
        redis.config_set("maxmemory-policy", "noeviction")
    assert found["kind"] == "server"
    assert "throw prompts away" in str(found["what"])


def test_a_server_that_is_not_there_is_told(run: Run, tmp_path: Path) -> None:
    (found,) = findings(run, "--redis-url", f"unix://{tmp_path}/nobody")
    assert found["kind"] == "server"


def test_a_folder_that_cannot_be_used_is_told(run: Run, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.processed.rmdir()
    folders.processed.write_text("not a folder")
    (found,) = findings(run)
    assert (found["kind"], found["where"]) == ("folder", str(folders.processed))
    folders.processed.unlink()
    real = doctor.os.access
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != folders.outputs and real(path, mode))
    (found,) = findings(run)
    assert (found["where"], found["what"]) == (str(folders.outputs), "cannot be written")


def test_a_disk_that_is_nearly_full_is_told_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "LEAST_FREE_BYTES", 1 << 62)
    (found,) = findings(run)
    assert found["kind"] == "disk"


@pytest.mark.parametrize(("seconds", "says"), [(100, "behind"), (-100, "ahead of")])
def test_clocks_that_differ_are_told(run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, says: str) -> None:
    real = doctor.time.time
    for module in ("producer.doctor", "contract.checkup"):
        monkeypatch.setattr(f"{module}.time", Clock(real, seconds))
    (found,) = findings(run)
    assert found["kind"] == "clock"
    assert f"100.0 s {says} this machine's" in str(found["what"])


class Clock:
    """The module `time` on a machine whose clock is wrong."""

    def __init__(self, real: Callable[[], float], seconds: float) -> None:
        self._real = real
        self._seconds = seconds

    def time(self) -> float:
        return self._real() + self._seconds


def test_leases_that_nobody_looks_after_are_told(
    run: Run, submit: Callable[..., str], redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> None:
    submit(2)
    (taken,) = Intake(redis, ledger, worker_settings(name="gone")).take(1)
    redis.zadd(taken.lease.lane.started, {taken.lease.member: ledger.now() - 120})
    found = {one["kind"]: one for one in findings(run)}
    assert set(found) == {"no_worker", "stuck_leases"}
    assert "1 leases ran out" in str(found["stuck_leases"]["what"])


def test_workers_that_get_nothing_done_are_told(
    run: Run,
    submit: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit(2, created_at=ledger.now() - 3 * 3600)
    with Intake(redis, ledger, worker_settings(name="w", scan_s=60)):
        (found,) = findings(run)
        assert (found["kind"], found["where"]) == ("stalled", "demo")
        assert "none has ended for 180 minutes" in str(found["what"])
        redis.hset(ledger.key("b"), "ended_at", ledger.now())
        assert findings(run) == []


def test_what_is_worth_knowing_does_not_make_it_ill(
    run: Run, submit: Callable[..., str], redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> None:
    Intake(redis, ledger, worker_settings(name="crashed")).evidence.ended("signal 9 (SIGKILL)")
    submit(2, created_at=ledger.now() - 2 * 86_400)
    redis.hset(ledger.key("b"), "ended_at", ledger.now())
    with Intake(redis, ledger, worker_settings(name="w", scan_s=60)):
        result = run("doctor")
    assert result.exit_code == 0
    assert "old_batch  b: 2 rows have not ended after 2.0 days; note: " in result.stdout
    assert "dead_worker  crashed: it died: signal 9 (SIGKILL); note: " in result.stdout
    assert result.stdout.endswith("all is well\n")
