"""A prompt that a worker takes is leased at once and ends exactly once, whoever crashes in between."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.registry import FailedJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer

from contract.errors import BadPrompt, PromptFailure, UsageError
from contract.jobs import RETRIES, ErrorCode
from contract.ledger import BatchState, Counts, Ledger, Mark
from contract.names import Names
from contract.paths import Folders
from contract.queues import queue, workers
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import waiting_ids
from worker.intake import Intake, Taken

FAILURE = PromptFailure(ErrorCode.MODEL_ERROR, "the model fell over")

HOLDER = """
import sys
from contract import logs
from contract.ledger import Ledger
from contract.queues import connect
from contract.settings import WorkerSettings
from worker.intake import Intake

root, url, name, room = sys.argv[1:]
settings = WorkerSettings(root=root, redis_url=url, name=name, lease_s=1.0, scan_s=0.1, linger_ms=0)
logs.set_up(settings.model_copy(update={"log_level": "error"}), name)
redis = connect(url)
with Intake(redis, Ledger(redis), settings) as intake:
    rows = intake.take(int(room), wait_s=20)
    print(*(row.index for row in rows), flush=True)
    for line in sys.stdin:
        print(intake.finish(rows), flush=True)
"""


@pytest.fixture
def intake(
    redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]
) -> Iterator[Callable[..., Intake]]:
    """Make intakes, each a worker of its own with live heartbeat and maintenance; all leave at the test's end."""
    made: list[Intake] = []

    def entered(**values: Any) -> Intake:
        one = Intake(redis, ledger, worker_settings(**{"name": f"w{len(made)}", **values}))
        made.append(one.__enter__())
        return one

    yield entered
    for one in made:
        one.__exit__(None, None, None)


@pytest.fixture
def quiet(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Callable[..., Intake]:
    """Make intakes that only do what they are told: no thread renews or repairs anything."""

    def unentered(**values: Any) -> Intake:
        return Intake(redis, ledger, worker_settings(**{"name": "quiet", **values}))

    return unentered


@pytest.fixture
def holder(
    folders: Folders, redis_url: str, submit: Callable[..., str]
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Start a worker process that takes rows and holds them until a line comes; returns it and what it took."""
    processes: list[subprocess.Popen[str]] = []

    def started(name: str, room: int) -> tuple[subprocess.Popen[str], list[int]]:
        command = [sys.executable, "-c", HOLDER, str(folders.root), redis_url, name, str(room)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout
        return process, [int(index) for index in process.stdout.readline().split()]

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def indices(rows: list[Taken]) -> list[int]:
    return [row.index for row in rows]


def demo(redis: Redis, priority: Any = "normal") -> Queue:
    return queue(redis, "demo", priority)


def standing(redis: Redis) -> list[str]:
    return waiting_ids(redis)


def started(redis: Redis) -> list[str]:
    return sorted(
        member.decode().partition(":")[0] for member in redis.zrange(demo(redis).started_job_registry.key, 0, -1)
    )


def status(redis: Redis, job_id: str) -> str:
    return redis.hget(Job.key_for(job_id), "status").decode()


def starts(redis: Redis, batch: str = "b") -> dict[int, int]:
    found = redis.hgetall(Names().batch(batch, "starts"))
    return {int(index): int(count) for index, count in found.items()}


def expire_leases(redis: Redis) -> None:
    """As if every worker had stood still for longer than its lease."""
    key = demo(redis).started_job_registry.key
    for member in redis.zrange(key, 0, -1):
        redis.zadd(key, {member: 1})


# Taking


def test_a_job_is_leased_the_moment_it_is_taken(redis: Redis, submit: Callable[..., str], quiet: Any) -> None:
    submit(3)
    rows = quiet(lease_s=30).take(2)
    assert indices(rows) == [0, 1]
    assert [(row.attempt, row.suspect, row.job.prompt) for row in rows] == [(1, 0, "prompt 0"), (1, 0, "prompt 1")]
    assert started(redis) == ["b-0", "b-1"]
    assert standing(redis) == ["b-2"]
    assert not redis.exists(demo(redis).intermediate_queue.key)
    seconds, micros = redis.time()
    scores = [score for _, score in redis.zrange(demo(redis).started_job_registry.key, 0, -1, withscores=True)]
    assert all(0 < score - (seconds + micros / 1e6) <= 30 for score in scores)
    assert status(redis, "b-0") == "started"
    execution = Job.fetch("b-0", redis, serializer=JSONSerializer).get_executions()[0]
    assert execution.worker_name == "quiet"


def test_more_urgent_queues_are_emptied_first(submit: Callable[..., str], quiet: Any) -> None:
    for priority in ("low", "normal", "high"):
        submit(2, batch=priority, priority=priority)
    taken = quiet().take(5)
    assert [row.batch for row in taken] == ["high", "high", "normal", "normal", "low"]


def test_no_more_than_the_room_is_taken_and_none_without_room(submit: Callable[..., str], quiet: Any) -> None:
    submit(3)
    one = quiet()
    assert one.take(0) == []
    assert indices(one.take(2)) == [0, 1]
    assert indices(one.take(5)) == [2]


def test_waiting_ends_with_the_first_job(submit: Callable[..., str], quiet: Any) -> None:
    one = quiet()
    assert one.take(1, wait_s=0.01) == []
    later = threading.Timer(0.1, submit, args=(1,))
    later.start()
    assert indices(one.take(1, wait_s=20)) == [0]
    later.join()


def test_an_idle_worker_lingers_for_more(
    submit: Callable[..., str], quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(1)
    monkeypatch.setattr("worker.intake.time.sleep", lambda _: submit(2, batch="late"))
    assert [row.batch for row in quiet(linger_ms=50).take(8)] == ["b", "late", "late"]


def test_a_busy_worker_does_not_linger(submit: Callable[..., str], quiet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(2)
    one = quiet(linger_ms=50)
    one.take(2)
    submit(1, batch="late")
    monkeypatch.setattr("worker.intake.time.sleep", lambda _: pytest.fail("lingered"))
    assert [row.batch for row in one.take(8)] == ["late"]


@pytest.mark.parametrize("mark", [Mark.DONE, Mark.FAILED])
def test_rows_that_ended_already_are_not_run_again(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any, mark: Mark
) -> None:
    submit(2)
    redis.setbit(ledger.key("b", mark), 0, 1)
    one = quiet()
    assert indices(one.take(8)) == [1]
    assert indices(one.held()) == [1]
    assert started(redis) == ["b-1"]
    assert starts(redis).keys() == {0, 1} if mark is Mark.FAILED else {1}
    assert redis.exists(Job.key_for("b-0")) == (mark is Mark.FAILED)


# Ending


def test_finishing_marks_the_row_and_deletes_its_job(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any
) -> None:
    submit(2)
    one = quiet()
    assert one.finish(one.take(2)) == 2
    assert ledger.marks([("b", 0), ("b", 1)]) == [Mark.DONE, Mark.DONE]
    assert one.held() == []
    assert list(redis.scan_iter("rq:job:*")) == []
    assert list(redis.scan_iter("rq:execution*")) == []
    assert started(redis) == []
    assert starts(redis) == {}


def test_a_retry_waits_a_random_part_of_a_growing_delay(
    redis: Redis, submit: Callable[..., str], quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(1)
    longest: list[float] = []
    monkeypatch.setattr("worker.intake.random.uniform", lambda low, high: longest.append(high) or low)
    one = quiet(max_attempts=10)
    for attempt in range(1, 6):
        (row,) = one.take(1)
        assert (row.attempt, row.suspect) == (attempt, 0)
        assert one.retry(row, FAILURE)
        assert one.held() == []
    assert longest == pytest.approx([0.02, 0.04, 0.08, 0.1, 0.1])
    assert starts(redis) == {}


def test_a_scheduled_retry_is_visible_to_rq_and_queued_when_due(
    redis: Redis, submit: Callable[..., str], quiet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(1)
    one = quiet(retry_base_s=1000, retry_max_s=1000)
    monkeypatch.setattr("worker.intake.random.uniform", lambda low, high: high)
    assert one.retry(one.take(1)[0], FAILURE)
    scheduled = ScheduledJobRegistry(queue=demo(redis))
    assert scheduled.get_job_ids() == ["b-0"]
    assert scheduled.get_scheduled_time("b-0") > datetime.now(UTC)
    assert Job.fetch("b-0", redis, serializer=JSONSerializer).meta["error"] == "model_error: the model fell over"
    assert one.take(1) == []
    redis.zadd(scheduled.key, {"b-0": 1})
    one.reconciler.run()
    assert standing(redis) == ["b-0"]
    assert one.take(1)[0].attempt == 2


@pytest.mark.parametrize("by", ["who takes", "maintenance"])
def test_retries_keep_their_schedule_when_the_worker_that_scheduled_them_dies(
    redis: Redis, submit: Callable[..., str], quiet: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("worker.intake.random.uniform", lambda low, high: high)
    submit(1)
    dies, lives = quiet(name="dies", retry_base_s=0.3, retry_max_s=0.3), quiet(name="lives")
    assert dies.retry(dies.take(1)[0], FAILURE)
    due = redis.zscore(ScheduledJobRegistry(queue=demo(redis)).key, "b-0")
    deadline = time.monotonic() + 20
    rows: list[Taken] = []
    while not (rows or standing(redis)) and time.monotonic() < deadline:
        rows = lives.take(1) if by == "who takes" else lives.reconciler.run() or []
    seconds, micros = redis.time()
    assert seconds + micros / 1e6 >= due
    assert [row.attempt for row in rows or lives.take(1)] == [2]


def test_only_failures_with_attempts_left_are_retried(submit: Callable[..., str], quiet: Any) -> None:
    submit(1)
    one = quiet(max_attempts=2)
    (row,) = one.take(1)
    assert one.will_retry(row, FAILURE)
    assert not one.will_retry(row, BadPrompt(ErrorCode.PROMPT_TOO_LONG, "too long"))
    one.retry(row, FAILURE)
    (row,) = one.take(1, wait_s=20)
    assert not one.will_retry(row, FAILURE)


@pytest.mark.parametrize("code", ErrorCode)
def test_how_often_a_failure_is_tried_again_depends_on_its_code(
    submit: Callable[..., str], quiet: Any, code: ErrorCode
) -> None:
    submit(1)
    one = quiet(max_attempts=3)
    for earlier in range(RETRIES.get(code, 0) or 2 if code in RETRIES else 0):
        (row,) = one.take(1, wait_s=20)
        assert row.attempt == earlier + 1
        assert one.will_retry(row, PromptFailure(code, "it failed"))
        one.retry(row, PromptFailure(code, "it failed"))
    (row,) = one.take(1, wait_s=20)
    assert not one.will_retry(row, PromptFailure(code, "it failed"))


def test_a_failed_row_is_marked_and_its_job_kept_among_the_failed(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any
) -> None:
    submit(1)
    one = quiet()
    assert one.fail(one.take(1)[0], FAILURE)
    assert ledger.marks([("b", 0)]) == [Mark.FAILED]
    assert FailedJobRegistry(queue=demo(redis)).get_job_ids() == ["b-0"]
    job = Job.fetch("b-0", redis, serializer=JSONSerializer)
    assert (job.get_status(), job._exc_info) == ("failed", "model_error: the model fell over")
    assert redis.ttl(job.key) > 364 * 86_400
    assert started(redis) == []
    assert starts(redis) == {}


def test_rows_given_back_stand_at_the_front_in_their_old_order(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(6)
    one = quiet()
    rows = one.take(4)
    assert one.give_back([rows[2], rows[0], rows[1]]) == 3
    assert standing(redis) == ["b-0", "b-1", "b-2", "b-4", "b-5"]
    assert starts(redis) == {3: 1}
    assert status(redis, "b-0") == "queued"
    assert [(row.index, row.attempt, row.suspect) for row in one.take(2)] == [(0, 1, 0), (1, 1, 0)]


def test_rows_given_back_go_to_the_queue_they_came_from(redis: Redis, submit: Callable[..., str], quiet: Any) -> None:
    submit(1, batch="h", priority="high")
    submit(1, batch="l", priority="low")
    one = quiet()
    one.give_back(one.take(2))
    assert [waiting_ids(redis, "demo", priority) for priority in ("high", "normal", "low")] == [["h-0"], [], ["l-0"]]


def test_leaving_gives_everything_back_and_ends_the_registration(
    redis: Redis, submit: Callable[..., str], worker_settings: Callable[..., WorkerSettings], ledger: Ledger
) -> None:
    submit(3)
    with Intake(redis, ledger, worker_settings(name="w", scan_s=60)) as one:
        one.take(2)
        assert [worker.name for worker in workers(redis)] == ["w"]
    assert standing(redis) == ["b-0", "b-1", "b-2"]
    assert starts(redis) == {}
    assert workers(redis) == []


def test_leaving_after_an_error_keeps_the_start_counted(
    redis: Redis, submit: Callable[..., str], worker_settings: Callable[..., WorkerSettings], ledger: Ledger
) -> None:
    submit(1)
    one = Intake(redis, ledger, worker_settings(scan_s=60)).__enter__()
    one.take(1)
    error = RuntimeError("the loop fell over")
    one.__exit__(RuntimeError, error, None)
    assert standing(redis) == ["b-0"]
    assert starts(redis) == {0: 1}


def test_nothing_is_left_when_nothing_is_held_waiting_or_scheduled(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    one = quiet(retry_base_s=1000, retry_max_s=1000)
    assert one.is_empty()
    submit(1)
    assert not one.is_empty()
    (row,) = one.take(1)
    assert not one.is_empty()
    one.retry(row, FAILURE)
    assert not one.is_empty()
    redis.zadd(ScheduledJobRegistry(queue=demo(redis)).key, {"b-0": 1})
    one.finish(one.take(1))
    assert one.is_empty()


# Leases


def test_heartbeats_keep_a_lease_for_longer_than_it_lasts(
    redis: Redis, submit: Callable[..., str], intake: Any, wait_until: Callable[..., None]
) -> None:
    submit(1)
    one = intake(lease_s=1.0)
    rows = one.take(1)
    key = demo(redis).started_job_registry.key
    first = redis.zrange(key, 0, -1, withscores=True)[0][1]
    wait_until(lambda: redis.zrange(key, 0, -1, withscores=True)[0][1] > first + 1.2)
    assert one.lost() == []
    assert one.finish(rows) == 1


@pytest.mark.parametrize("ending", ["finish", "retry", "fail", "give_back"])
def test_who_lost_a_lease_changes_nothing(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any, ending: str
) -> None:
    submit(1)
    slow, quick = quiet(name="slow"), quiet(name="quick")
    (row,) = slow.take(1)
    expire_leases(redis)
    quick.reconciler.run()
    (again,) = quick.take(1)
    assert (again.attempt, again.suspect) == (1, 1)
    end = {
        "finish": lambda: slow.finish([row]),
        "retry": lambda: slow.retry(row, FAILURE),
        "fail": lambda: slow.fail(row, FAILURE),
        "give_back": lambda: slow.give_back([row]),
    }
    assert not end[ending]()
    assert ledger.marks([("b", 0)]) == [None]
    assert started(redis) == ["b-0"]
    assert standing(redis) == []
    assert starts(redis) == {0: 2}
    assert quick.finish([again]) == 1


def test_a_worker_is_told_which_rows_it_lost(
    redis: Redis, submit: Callable[..., str], intake: Any, wait_until: Callable[..., None]
) -> None:
    submit(2)
    one = intake(lease_s=1.0)
    rows = one.take(2)
    redis.zrem(demo(redis).started_job_registry.key, rows[0].lease.member)
    lost: list[Taken] = []
    wait_until(lambda: lost.extend(one.lost()) or lost)
    assert lost == rows[:1]
    assert one.held() == rows[1:]


def test_rows_of_a_killed_process_are_run_again_and_a_stalled_owner_is_fenced(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], holder: Any, intake: Any
) -> None:
    submit(3)
    process, held = holder("victim", 2)
    assert held == [0, 1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    one = intake(lease_s=30)
    found = {row.index: row for row in one.take(8)}
    deadline = time.monotonic() + 20
    while found.keys() != {0, 1, 2} and time.monotonic() < deadline:
        found |= {row.index: row for row in one.take(8, wait_s=1)}
    assert {index: row.suspect for index, row in found.items()} == {0: 1, 1: 1, 2: 0}
    assert {row.attempt for row in found.values()} == {1}  # a crash costs no attempt
    assert one.finish(list(found.values())) == 3
    assert ledger.get("b").counts == Counts(total=3, submitted=3, done=3, failed=0)


def test_a_stopped_process_that_goes_on_finds_its_rows_taken(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], holder: Any, intake: Any, wait_until: Callable[..., None]
) -> None:
    submit(1)
    process, held = holder("sleeper", 1)
    assert held == [0]
    process.send_signal(signal.SIGSTOP)
    one = intake(lease_s=30)
    (row,) = one.take(1, wait_s=20)
    process.send_signal(signal.SIGCONT)
    print("finish", file=process.stdin, flush=True)
    assert process.stdout.readline() == "0\n"
    assert ledger.marks([("b", 0)]) == [None]
    assert one.finish([row]) == 1
    assert started(redis) == []
    assert standing(redis) == []


def test_a_job_stranded_between_queue_and_registry_is_put_back(
    redis: Redis, submit: Callable[..., str], quiet: Any, wait_until: Callable[..., None]
) -> None:
    submit(2)
    redis.lmove(redis.names.backlog("b"), demo(redis).intermediate_queue.key, "LEFT", "RIGHT")
    one = quiet(lease_s=0.2)
    one.reconciler.run()
    assert standing(redis) == ["b-1"]
    wait_until(lambda: one.reconciler.run() or standing(redis) == ["b-0", "b-1"])
    assert not redis.exists(demo(redis).intermediate_queue.key)


def test_a_name_left_by_a_killed_process_is_free_at_once(
    redis: Redis, submit: Callable[..., str], holder: Any, intake: Any
) -> None:
    submit(1)
    process, _ = holder("same", 1)
    process.kill()
    process.wait()
    assert intake(name="same", lease_s=30).name == "same"


def test_a_name_that_a_living_worker_has_is_refused(
    submit: Callable[..., str], quiet: Any, intake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake(name="same")
    with monkeypatch.context() as hurried:
        hurried.setattr("worker.intake.time.monotonic", partial(next, itertools.count(step=10)))
        with pytest.raises(UsageError, match=r"'same' is running on .* \(process \d+\)"):
            quiet(name="same").__enter__()


# Suspects


def crash(redis: Redis, one: Intake) -> None:
    """The worker that holds rows dies; what it held returns to the queue."""
    expire_leases(redis)
    one.reconciler.run()


def test_a_row_that_ran_through_two_crashes_runs_alone(redis: Redis, submit: Callable[..., str], quiet: Any) -> None:
    submit(1)
    for _ in range(2):
        assert indices(quiet().take(1)) == [0]
        crash(redis, quiet())
    submit(3, batch="calm")
    one = quiet()
    assert one.take(0) == []
    calm = one.take(8)
    assert [row.batch for row in calm] == ["calm", "calm", "calm"]
    assert one.take(8) == []
    assert one.finish(calm[:2]) == 2
    assert one.take(8) == []
    assert one.finish(calm[2:]) == 1
    (suspect,) = one.take(8)
    assert (suspect.batch, suspect.suspect) == ("b", 2)
    submit(1, batch="later")
    assert one.take(8) == []
    assert one.finish([suspect]) == 1
    assert [row.batch for row in one.take(8)] == ["later"]


def test_a_row_is_quarantined_after_its_third_crash_and_neighbours_are_not(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any
) -> None:
    submit(3)
    for _ in range(2):  # all three run together
        assert indices(quiet().take(8)) == [0, 1, 2]
        crash(redis, quiet())
    one = quiet()
    assert one.finish(one.take(8)) == 1  # alone, and well
    assert indices(one.take(8)) == [1]  # alone; the worker dies, and row 2, which only waited, with it
    crash(redis, quiet())
    one = quiet()
    rows = one.take(8)
    rejected = one.rejected()
    assert [(row.index, row.error.code) for row in rejected] == [(1, ErrorCode.WORKER_CRASHED)]
    assert "3 times" in str(rejected[0].error)
    assert indices(rows) == [2]
    assert one.finish(rows) == 1
    assert one.fail(rejected[0])
    assert ledger.get("b").counts == Counts(total=3, submitted=3, done=2, failed=1)
    assert FailedJobRegistry(queue=demo(redis)).get_job_ids() == ["b-1"]


def test_a_suspect_is_counted_when_it_runs_and_not_while_it_waits(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(3)
    for _ in range(2):
        quiet().take(8)
        crash(redis, quiet())
    one = quiet()
    (alone,) = one.take(8)
    assert starts(redis) == {0: 3, 1: 2, 2: 2}
    assert one.give_back([alone]) == 1
    assert starts(redis) == {0: 2, 1: 2, 2: 2}
    one.__exit__(None, None, None)
    assert starts(redis) == {0: 2, 1: 2, 2: 2}
    assert standing(redis) == ["b-1", "b-2", "b-0"]


def test_losing_a_waiting_suspect_does_not_stop_the_worker(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(2)
    for _ in range(2):
        quiet().take(8)
        crash(redis, quiet())
    stalled, other = quiet(name="stalled"), quiet(name="other")
    (alone,) = stalled.take(8)
    crash(redis, other)
    submit(1, batch="calm")
    stalled._beat()
    assert sorted(indices(stalled.lost())) == [0, 1]
    assert stalled.finish([alone]) == 0
    calm = stalled.take(8)
    assert [row.batch for row in calm] == ["calm"]
    assert stalled.finish(calm) == 1


def test_crashes_of_real_processes_are_counted(
    redis: Redis, submit: Callable[..., str], holder: Any, quiet: Any, wait_until: Callable[..., None]
) -> None:
    submit(1)
    one = quiet()
    for crashes in range(1, 4):
        process, held = holder(f"victim-{crashes}", 1)
        assert held == [0]
        process.kill()
        process.wait()
        expire_leases(redis)
        assert starts(redis) == {0: crashes}
    one.reconciler.run()
    assert one.take(1) == []
    (rejected,) = one.rejected()
    row = rejected.error_row("w")
    assert (row.id, row.prompt, row.error.code) == ("id-0", "prompt 0", ErrorCode.WORKER_CRASHED)
    assert one.rejected() == []


# Damaged jobs


def break_hash(redis: Redis, key: str) -> None:
    redis.delete(key)
    redis.set(key, "not a hash")


@pytest.mark.parametrize(
    "damage",
    [
        break_hash,
        lambda redis, key: redis.hset(key, "data", b"\x80\x04pickle"),
        lambda redis, key: redis.hdel(key, "data"),
        lambda redis, key: redis.hset(key, "created_at", "yesterday"),
        lambda redis, key: redis.hset(key, "meta", '{"attempts": "many"}'),
    ],
    ids=["no hash", "no JSON", "no data", "no date", "no number"],
)
def test_a_damaged_job_is_rejected_and_harms_no_neighbour(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any, damage: Callable[[Redis, str], object]
) -> None:
    submit(2)
    damage(redis, Job.key_for("b-0"))
    one = quiet()
    assert indices(one.take(8)) == [1]
    (rejected,) = one.rejected()
    assert (rejected.batch, rejected.index, rejected.error.code) == ("b", 0, ErrorCode.BAD_ROW)
    assert "damaged" in str(rejected.error)
    assert rejected.error_row("w").index == 0
    assert one.fail(rejected)
    assert ledger.marks([("b", 0)]) == [Mark.FAILED]
    assert started(redis) == ["b-1"]
    one.reconciler.run()


@pytest.mark.parametrize("where", ["waiting", "started", "scheduled", "given back"])
def test_a_row_whose_job_was_deleted_ends_as_an_error(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], quiet: Any, where: str
) -> None:
    submit(1)
    one = quiet()
    if where == "waiting":
        redis.delete(Job.key_for("b-0"))
    else:
        rows = one.take(1)
        if where == "started":
            redis.delete(Job.key_for("b-0"))
            crash(redis, quiet())
        elif where == "scheduled":
            one.retry(rows[0], FAILURE)
            redis.delete(Job.key_for("b-0"))
        else:
            redis.delete(Job.key_for("b-0"))
            one.give_back(rows)
    other = quiet(name="other")
    assert other.take(1, wait_s=20) == []
    (rejected,) = other.rejected()
    assert "deleted" in str(rejected.error)
    assert other.fail(rejected)
    assert ledger.marks([("b", 0)]) == [Mark.FAILED]
    assert list(redis.scan_iter("rq:job:*")) == []
    assert other.is_empty()


def test_a_row_that_ended_leaves_nothing_behind_when_its_id_stands_in_the_queue_again(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(1)
    one = quiet()
    one.finish(one.take(1))
    redis.rpush(demo(redis).key, "b-0")
    assert one.take(1) == []
    assert one.rejected() == []
    assert one.is_empty()
    assert list(redis.scan_iter("rq:job:*")) == []
    assert starts(redis) == {}


def put_payload(redis: Redis, job_id: str, change: Callable[[dict[str, Any]], object]) -> None:
    job = Job.fetch(job_id, redis, serializer=JSONSerializer)
    payload = dict(job.args[0])
    change(payload)
    job.args = (payload,)
    job.save()


def test_a_job_of_a_newer_version_is_rejected_with_what_to_do(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(1)
    put_payload(redis, "b-0", lambda payload: payload.update(schema_version=99, news=True))
    one = quiet()
    assert one.take(1) == []
    (rejected,) = one.rejected()
    assert str(rejected.error) == "the job's schema is 99 and this worker knows 1: upgrade it, then `producer retry`"
    assert rejected.error_row("w").prompt == "prompt 0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda payload: payload.pop("id"), "id: Field required"),
        (lambda payload: payload.update(index=7), "it says that it is b-7"),
        (lambda payload: payload.update(params={"threshold": 2}), "params.threshold"),
    ],
    ids=["field missing", "another row", "bad parameter"],
)
def test_a_payload_that_is_no_prompt_names_the_fault(
    redis: Redis, submit: Callable[..., str], quiet: Any, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    submit(1)
    put_payload(redis, "b-0", change)
    one = quiet()
    assert one.take(1) == []
    assert message in str(one.rejected()[0].error)


@pytest.mark.parametrize("job_id", ["stranger", "../../elsewhere-1", "b-\u0663", "b-12345678901"])
def test_a_job_that_is_not_ours_is_put_among_the_failed(redis: Redis, quiet: Any, job_id: str) -> None:
    redis.hset(Job.key_for(job_id), mapping={"data": "x", "created_at": "2026-01-01T00:00:00Z"})
    redis.rpush(demo(redis).key, job_id)
    one = quiet()
    assert one.take(1) == []
    assert one.rejected() == []
    assert one.is_empty()
    assert redis.zrange(FailedJobRegistry(queue=demo(redis)).key, 0, -1) == [job_id.encode()]


# RQ's own tools


def test_rqs_clean_up_puts_rows_of_dead_workers_back(redis: Redis, submit: Callable[..., str], quiet: Any) -> None:
    submit(2)
    quiet().take(2)
    expire_leases(redis)
    StartedJobRegistry(queue=demo(redis)).cleanup()
    assert sorted(standing(redis)) == ["b-0", "b-1"]
    assert started(redis) == []
    one = quiet()
    rows = one.take(2)
    assert [(row.attempt, row.suspect) for row in rows] == [(1, 1), (1, 1)]
    assert one.finish(rows) == 2


def test_rqs_clean_up_leaves_living_rows_alone(redis: Redis, submit: Callable[..., str], quiet: Any) -> None:
    submit(1)
    one = quiet(lease_s=30)
    rows = one.take(1)
    assert StartedJobRegistry(queue=demo(redis)).get_job_ids() == ["b-0"]
    assert one.finish(rows) == 1


def test_rq_info_shows_the_worker_and_loses_nothing(
    redis: Redis, redis_url: str, submit: Callable[..., str], intake: Any
) -> None:
    submit(3)
    one = intake(name="visible", lease_s=30)
    rows = one.take(1)
    command = [str(Path(sys.executable).with_name("rq")), "info", "--url", redis_url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "visible" in shown
    assert demo(redis).name in shown
    assert one.finish(rows) == 1
    assert indices(one.take(8)) == [1, 2]


def test_rq_info_puts_rows_of_dead_workers_back_with_their_attempts(
    redis: Redis, redis_url: str, submit: Callable[..., str], quiet: Any
) -> None:
    submit(2)
    one = quiet()
    assert all(one.retry(row, FAILURE) for row in one.take(2))
    rows = one.take(1, wait_s=20) + one.take(1, wait_s=20)
    assert [row.attempt for row in rows] == [2, 2]
    expire_leases(redis)
    command = [str(Path(sys.executable).with_name("rq")), "info", "--url", redis_url]
    subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(standing(redis)) == ["b-0", "b-1"]
    rows = quiet().take(2)
    assert [(row.attempt, row.suspect, row.job.prompt is not None) for row in rows] == [(2, 1, True), (2, 1, True)]


def test_a_stock_worker_says_what_to_run_instead_and_loses_nothing(
    redis: Redis,
    submit: Callable[..., str],
    quiet: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.tasks.PAUSE_S", 0)
    submit(1)
    one = quiet()
    one.give_back(one.take(1))  # RQ's worker sees only what stands in RQ's list
    stock = SimpleWorker([demo(redis)], connection=redis, serializer=JSONSerializer)
    stock.work(burst=True, max_jobs=1)
    assert "run `worker run` on it instead of `rq worker`" in caplog.text
    assert standing(redis) == ["b-0"]


# Maintenance


def test_maintenance_publishes_what_is_complete(
    ledger: Ledger,
    folders: Folders,
    submit: Callable[..., str],
    completion: Callable[..., Any],
    intake: Any,
    wait_until: Callable[..., None],
) -> None:
    submit(1)
    one = intake()
    rows = one.take(1)
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
    one.finish(rows)
    wait_until(lambda: ledger.get("b").state is BatchState.DONE)
    assert (folders.outputs / "b.jsonl").exists()


def test_trouble_with_one_queue_does_not_keep_maintenance_from_the_others(
    redis: Redis, submit: Callable[..., str], quiet: Any
) -> None:
    submit(1)
    quiet().take(1)
    expire_leases(redis)
    redis.set(demo(redis, "high").key, "not a list")
    redis.set(demo(redis, "high").intermediate_queue.key, "not a list")
    quiet().reconciler.run()
    assert standing(redis) == ["b-0"]
