"""Batches of one queue take turns, those outside their hours sit out, and every row stands in one place at any time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from contract import queues, turns
from contract.errors import PromptFailure
from contract.hours import Hours, Stretch
from contract.jobs import ErrorCode
from contract.ledger import BatchSpec, Cursor, Ledger
from contract.names import Names
from contract.paths import Folders
from contract.queues import enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from producer import report
from tests.conftest import prompt_job, waiting_ids
from tests.producer.conftest import PRODUCER
from worker.intake import Intake, Taken

FAILURE = PromptFailure(ErrorCode.MODEL_ERROR, "the model fell over")
NAME = "dllm-demo-normal"
LATER = 4e9
"""A moment far away."""


@pytest.fixture
def intake(redis: Redis, ledger: Ledger, worker_settings: Callable[..., WorkerSettings]) -> Intake:
    """One that does only what it is told."""
    return Intake(redis, ledger, worker_settings(name="w", lease_s=30, retry_base_s=1000, retry_max_s=1000))


def batches(rows: list[Taken]) -> str:
    return "".join(row.batch for row in rows)


def standing(redis: Redis) -> dict[str, list[bytes]]:
    """Batches in the turns and among those whose hours are watched."""
    return {
        "turns": redis.zrange(redis.names.turns(NAME), 0, -1),
        "hours": redis.zrange(redis.names.hours(NAME), 0, -1),
    }


NOWHERE: dict[str, list[bytes]] = {"turns": [], "hours": []}


# Turns


def test_a_short_batch_does_not_wait_for_a_long_one(submit: Callable[..., str], intake: Intake) -> None:
    submit(5_000, batch="l")
    submit(10, batch="s")
    rows = [row for _ in range(25) for row in intake.take(1)]
    assert batches(rows) == "ls" * 10 + "l" * 5
    assert [row.index for row in rows if row.batch == "s"] == list(range(10))


def test_a_short_batch_that_comes_while_a_long_one_runs_is_done_soon(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    submit(300, batch="l")
    assert batches(intake.take(32)) == "l" * 32
    submit(10, batch="s")
    assert Counter(batches(intake.take(20))) == {"l": 10, "s": 10}
    assert standing(redis)["turns"] == [b"l"]


def test_three_batches_interleave_a_row_each_and_keep_their_order(submit: Callable[..., str], intake: Intake) -> None:
    for batch, count in (("a", 6), ("b", 2), ("c", 4)):
        submit(count, batch=batch)
    rows = intake.take(7) + intake.take(8)
    assert batches(rows) == "abcabcacacaa"
    for batch, count in (("a", 6), ("b", 2), ("c", 4)):
        assert [row.index for row in rows if row.batch == batch] == list(range(count))


def test_a_batch_that_was_empty_for_a_while_gains_nothing_by_it(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    submit(100, batch="l")
    submit(1, batch="s")
    assert batches(intake.take(20)) == "ls" + "l" * 18
    add(redis, ledger, "s", range(1, 21))
    assert batches(intake.take(10)) == "ls" * 5


def add(redis: Redis, ledger: Ledger, batch: str, indices: range) -> None:
    """More rows of a batch that is being submitted."""
    with redis.pipeline() as pipe:
        jobs = [prompt_job(batch, index) for index in indices]
        enqueuing(queue(redis, "demo", "normal"), jobs)(pipe)
        pipe.execute()


def test_priorities_come_before_turns(submit: Callable[..., str], intake: Intake) -> None:
    submit(3, batch="n")
    submit(2, batch="w", priority="low")
    submit(3, batch="h", priority="high")
    submit(2, batch="i", priority="high")
    assert batches(intake.take(4) + intake.take(6)) == "hihih" + "nnn" + "ww"


def test_rows_given_back_come_first_and_in_their_order(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    submit(4, batch="a")
    submit(4, batch="b")
    rows = intake.take(5)
    assert batches(rows) == "ababa"
    intake.give_back(rows)
    assert waiting_ids(redis)[:5] == ["a-0", "b-0", "a-1", "b-1", "a-2"]
    assert [f"{row.batch}-{row.index}" for row in intake.take(8)] == [
        "a-0", "b-0", "a-1", "b-1", "a-2", "b-2", "a-3", "b-3",
    ]  # fmt: skip


def test_rows_of_versions_that_knew_no_turns_are_taken(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    submit(3, batch="a")
    redis.rename(redis.names.backlog("a"), queue(redis, "demo", "normal").key)
    redis.delete(redis.names.turns(NAME))
    assert queues.depths(redis, "demo")["normal"] == 3
    assert [row.index for row in intake.take(8)] == [0, 1, 2]


def test_rows_queued_again_by_a_person_take_turns_too(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    submit(20, batch="f")
    for row in intake.take(20):
        assert intake.fail(row, FAILURE)
    submit(3, batch="s")
    target = queue(redis, "demo", "normal")
    ledger.reopen("f", range(20), queues.requeuing(redis, target, [f"f-{index}" for index in range(20)]))
    assert batches(intake.take(7)) == "sfsfsff"[:7]


def test_a_batch_without_rows_stands_nowhere(redis: Redis, submit: Callable[..., str], intake: Intake) -> None:
    submit(2, batch="a", hours=Hours(not_before=1.0))
    submit(2, batch="b")
    assert standing(redis) == {"turns": [b"b"], "hours": [b"a"]}
    assert intake.finish(intake.take(8)) == 4
    assert standing(redis) == NOWHERE
    assert not list(redis.scan_iter("*backlog*"))


def test_a_batch_whose_rows_were_removed_is_passed_over(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    submit(2, batch="a")
    submit(2, batch="b")
    submit(2, batch="c", hours=Hours(not_before=1.0))
    redis.delete(redis.names.backlog("a"), redis.names.backlog("c"))
    assert batches(intake.take(8)) == "bb"
    assert standing(redis) == NOWHERE


def test_everything_that_counts_sees_the_backlogs(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    submit(5, batch="a")
    submit(3, batch="b", hours=Hours(not_before=LATER))
    submit(2, batch="c", priority="high")
    assert queues.depths(redis, "demo") == {"high": 2, "normal": 8, "low": 0}
    rows = intake.take(3)
    assert queues.depths(redis, "demo") == {"high": 0, "normal": 7, "low": 0}
    intake.give_back(rows)
    assert queues.depths(redis, "demo") == {"high": 2, "normal": 8, "low": 0}
    assert turns.waiting(redis, ["a", "b", "c", "nobody"]) == [4, 3, 0, 0]


def test_taking_costs_the_same_however_much_waits(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    def commands() -> int:
        before = redis.info("commandstats")
        intake.take(8)
        after = redis.info("commandstats")
        return sum(after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after)

    submit(100, batch="a")
    submit(100, batch="b")
    few = commands()
    for number in range(50):
        submit(1, batch=f"c{number}")
        add(redis, ledger, f"c{number}", range(1, 40))
    assert commands() <= few + 2


def test_a_row_is_in_the_intermediate_list_when_the_script_fails_halfway(
    redis: Redis, submit: Callable[..., str], intake: Intake, wait_until: Callable[..., None]
) -> None:
    submit(2, batch="a")
    redis.set(ledger_starts("a"), "not a hash")
    with pytest.raises(ResponseError):
        intake.take(1)
    redis.delete(ledger_starts("a"))
    places = [*waiting_ids(redis), *(one.decode() for one in redis.lrange(intermediate(redis), 0, -1))]
    assert Counter(places) == {"a-0": 1, "a-1": 1}


def ledger_starts(batch: str) -> str:
    return Names().batch(batch, "starts")


def intermediate(redis: Redis) -> str:
    return queue(redis, "demo", "normal").intermediate_queue.key


def test_every_row_stands_in_one_place_whatever_happens(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    dice = random.Random(7)
    sizes = {"a": 40, "b": 7, "c": 20}
    submit(sizes["a"], batch="a")
    submit(sizes["b"], batch="b", hours=Hours(not_before=1.0))
    submit(sizes["c"], batch="c", hours=Hours(not_before=LATER))
    held: list[Taken] = []
    done: set[str] = set()
    for _ in range(120):
        action = dice.choice(["take", "take", "finish", "give_back", "crash", "retry", "hours"])
        some = [held.pop() for _ in range(min(len(held), dice.randint(0, 4)))]
        if action == "take":
            held += some + intake.take(dice.randint(1, 6))
            assert intake.rejected() == []
        elif action == "finish":
            assert intake.finish(some) == len(some)
            done |= {row.job.job_id for row in some}
        elif action == "retry":
            assert all(intake.retry(row, FAILURE) for row in some)
        elif action == "crash":
            for row in some:
                redis.zadd(row.lease.lane.started, {row.lease.member: 1})
                redis.hdel(ledger_starts(row.batch), str(row.index))  # no suspects here
                intake._let_go([row])
            intake.reconciler.run()
        elif action == "hours":
            opens = dice.choice([1.0, LATER])
            redis.hset(ledger.key("c"), "hours", Hours(not_before=opens).model_dump_json())
            redis.zadd(redis.names.hours(NAME), {"c": 0}, xx=True)
            held += some
        else:
            assert intake.give_back(some) == len(some)
        scheduled = [one.decode() for one in redis.zrange(intake._lanes[1].scheduled, 0, -1)]
        places = Counter([*waiting_ids(redis), *scheduled, *(row.job.job_id for row in held), *done])
        assert places == {f"{batch}-{index}": 1 for batch, size in sizes.items() for index in range(size)}, action


def test_a_producer_killed_between_chunks_leaves_every_row_once_and_takes_no_other_turn(
    redis: Redis, redis_url: str, ledger: Ledger, folders: Folders, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(8_000)))
    command = [*PRODUCER, "submit", str(file), "--root", str(folders.root), "--redis-url", redis_url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "DLLM_MAX_QUEUED": "9000"}) as dying:
        wait_until(lambda: any(batch.counts.submitted for batch in ledger.newest()))
        dying.send_signal(signal.SIGKILL)
    (batch,) = ledger.newest()
    assert waiting_ids(redis) == [f"{batch.spec.batch}-{index}" for index in range(batch.counts.submitted)]
    assert standing(redis) == {"turns": [batch.spec.batch.encode()], "hours": []}


# Hours


def soon(redis: Redis, after_s: float) -> float:
    seconds, micros = redis.time()
    return float(seconds + micros / 1e6 + after_s)


def test_a_batch_runs_when_its_time_has_come_and_others_meanwhile(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    opens = soon(redis, 0.6)
    submit(3, batch="w", hours=Hours(not_before=opens))
    submit(2, batch="o")
    assert batches(intake.take(8)) == "oo"
    assert standing(redis) == {"turns": [], "hours": [b"w"]}
    rows = intake.take(8, wait_s=20)
    assert batches(rows) == "www"
    assert soon(redis, 0) >= opens


def test_a_window_that_closes_takes_the_batch_out_and_running_rows_finish(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake, wait_until: Callable[..., None]
) -> None:
    first = soon(redis, -3600)
    submit(10, batch="w", hours=Hours(window="22:00-06:00", stretches=(Stretch(first, 1_000_000, 3601.0),)))
    rows = intake.take(2)
    assert batches(rows) == "ww"
    wait_until(lambda: soon(redis, 0) > first + 3601.0)
    assert intake.take(8) == []
    assert standing(redis) == {"turns": [], "hours": [b"w"]}
    assert redis.zscore(redis.names.hours(NAME), "w") == pytest.approx(first + 86_400, abs=1e-3)
    assert intake.finish(rows[:1]) == 1
    assert intake.give_back(rows[1:]) == 1  # it had begun, so it finishes
    assert [row.index for row in intake.take(8)] == [1]
    redis.hset(ledger.key("w"), "hours", Hours().model_dump_json())
    redis.zadd(redis.names.hours(NAME), {"w": 0})
    assert [row.index for row in intake.take(8)] == list(range(2, 10))


def test_hours_hold_for_rows_that_a_producer_adds_and_a_person_queues_again(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], intake: Intake
) -> None:
    submit(1, batch="w", hours=Hours(not_before=1.0))
    (row,) = intake.take(1)
    assert intake.fail(row, FAILURE)
    redis.hset(ledger.key("w"), "hours", Hours(not_before=LATER).model_dump_json())
    ledger.reopen("w", [0], queues.requeuing(redis, queue(redis, "demo", "normal"), ["w-0"]))
    add(redis, ledger, "w", range(1, 3))
    assert intake.take(8) == []
    assert waiting_ids(redis) == ["w-0", "w-1", "w-2"]


def test_a_worker_that_ends_with_the_work_does_not_wait_for_anybodys_hours(
    redis: Redis, submit: Callable[..., str], intake: Intake
) -> None:
    submit(2, batch="w", hours=Hours(not_before=LATER))
    assert not intake.is_empty()  # nobody has looked at it yet
    assert intake.take(8) == []
    assert intake.is_empty()
    submit(1, batch="o")
    assert not intake.is_empty()
    assert intake.finish(intake.take(8)) == 1
    assert intake.is_empty()


def test_the_ledger_keeps_hours_and_the_report_says_until_when_rows_wait(
    redis: Redis, ledger: Ledger, folders: Folders, submit: Callable[..., str], intake: Intake
) -> None:
    submit(2, batch="w", hours=Hours(not_before=LATER, window=None))
    submit(2, batch="o", hours=Hours(not_before=1.0))
    submit(1, batch="n")
    found = {one.batch: one.waits_until for one in report.system(ledger, folders, "demo").batches}
    assert found == {"w": LATER, "o": None, "n": None}
    batch = ledger.get("w")
    assert batch is not None
    assert batch.spec.hours == Hours(not_before=LATER)
    redis.delete(redis.names.backlog("w"))
    assert report.batch_reports([batch], ledger, folders)[0].waits_until is None


def test_specs_of_versions_that_knew_no_hours_are_read(ledger: Ledger, redis: Redis) -> None:
    values = {"source": "b.txt", "output": "b", "kind": "txt", "model": "m", "priority": "low", "created_at": 1.0}
    spec = BatchSpec.model_validate({"batch": "b", "params": SamplingParams(), **values})
    ledger.create(spec)
    redis.hset(ledger.key("b"), "spec", spec.model_dump_json(exclude={"hours"}))
    batch = ledger.get("b")
    assert batch is not None
    assert batch.spec == spec
    assert ledger.cursor("b") == Cursor()
