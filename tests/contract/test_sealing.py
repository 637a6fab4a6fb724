"""A complete batch is published once, whole and in order, whatever crashes on the way."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from contract import merging, paths, sealing, stores
from contract.errors import PromptFailure, UsageError
from contract.jobs import ErrorCode, Row
from contract.ledger import BatchState, Counts, Ledger, Mark
from contract.paths import Folders
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import waiting_ids
from tests.crashing import Crash, dying_at
from worker.intake import Intake


@pytest.fixture(autouse=True)
def _cleared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "SYNCED_S", 0.0)


@pytest.fixture
def write(folders: Folders, ledger: Ledger) -> Callable[..., None]:
    """Put rows into a writer's segment and mark them, as a worker does."""

    def written(batch: str, writer: str, *rows: Row) -> None:
        with SegmentWriter(folders, batch, writer) as segment:
            segment.append(rows)
        with ledger.redis.pipeline() as pipe:
            for row in rows:
                ledger.mark(pipe, batch, row.index, Mark.DONE if hasattr(row, "output") else Mark.FAILED)
            pipe.execute()

    return written


@pytest.fixture
def mixed(submit: Callable[..., str], write: Any, completion: Any, failure: Any) -> Callable[..., str]:
    """Make a complete batch of five rows from two writers, the second and fourth of which failed."""

    def made(**values: Any) -> str:
        batch = submit(5, **values)
        write(batch, "a", completion(4), failure(1))
        write(batch, "b", completion(0), failure(3), completion(2))
        return batch

    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outputs(folders: Folders, name: str = "b") -> list[str]:
    return [row["output"] for row in lines(folders.outputs / f"{name}.jsonl")]


def published(folders: Folders) -> dict[str, bytes]:
    """Everything a user can see after sealing."""
    roots = (folders.outputs, folders.processed, folders.inputs)
    return {
        str(path.relative_to(folders.root)): path.read_bytes()
        for root in roots
        for path in root.rglob("*.*")
        if path.is_file() and folders.segments not in path.parents
    }


# Merging


def test_rows_of_several_segments_are_published_in_index_order(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    batch = mixed()
    assert sealing.seal_ready(ledger, folders) == [batch]
    assert outputs(folders) == ["output 0", "output 2", "output 4"]
    errors = lines(folders.outputs / "b.errors.jsonl")
    assert [(row["id"], row["line"], row["error"]["code"]) for row in errors] == [
        ("id-1", 2, "model_error"),
        ("id-3", 4, "model_error"),
    ]
    assert all("index" not in row for row in errors + lines(folders.outputs / "b.jsonl"))
    assert ledger.get("b").state is BatchState.DONE
    assert ledger.open_batches() == []
    assert list(folders.segments.iterdir()) == []


def test_a_row_that_is_done_gives_its_first_output_whatever_else_was_written(
    submit: Callable[..., str], write: Any, completion: Any, failure: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(1)
    write(batch, "a", completion(0, "first"), completion(0, "second"), failure(0))
    write(batch, "b", completion(0, "third"))
    sealing.seal(batch, ledger, folders)
    assert outputs(folders) == ["first"]
    assert not (folders.outputs / "b.errors.jsonl").exists()


def test_a_row_that_failed_gives_its_last_error_whatever_else_was_written(
    submit: Callable[..., str], write: Any, completion: Any, failure: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(1)
    write(batch, "a", failure(0, "first"), completion(0))
    write(batch, "b", failure(0, "last"))
    sealing.seal(batch, ledger, folders)
    assert outputs(folders) == []
    assert [row["error"]["message"] for row in lines(folders.outputs / "b.errors.jsonl")] == ["last"]


def test_rows_that_are_on_no_disk_become_error_rows_and_the_ledger_agrees(
    submit: Callable[..., str], write: Any, completion: Any, failure: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(3)
    write(batch, "lost", completion(0), failure(2))
    shutil.rmtree(folders.segments / batch)
    write(batch, "kept", completion(1))
    assert sealing.seal(batch, ledger, folders)
    assert outputs(folders) == ["output 1"]
    errors = lines(folders.outputs / "b.errors.jsonl")
    assert [(row["id"], row["error"]["code"]) for row in errors] == [("0", "worker_crashed"), ("2", "worker_crashed")]
    assert ledger.get(batch).counts == Counts(total=3, submitted=3, done=1, failed=2)
    assert [row.index for row in sealing.errors(batch, ledger, folders)] == [0, 2]


def test_a_batch_without_rows_is_published_empty(submit: Callable[..., str], ledger: Ledger, folders: Folders) -> None:
    assert sealing.seal(submit(0), ledger, folders)
    assert (folders.outputs / "b.jsonl").read_bytes() == b""
    assert (folders.processed / "b.jsonl").exists()


def test_more_segments_than_may_be_open_at_once_are_merged(
    submit: Callable[..., str],
    write: Any,
    completion: Any,
    ledger: Ledger,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "OPEN_SEGMENTS", 2)
    batch = submit(9)
    for index in range(9):
        write(batch, f"w{index % 5}", completion(index))
    sealing.seal(batch, ledger, folders)
    assert outputs(folders) == [f"output {index}" for index in range(9)]


def test_an_incomplete_unknown_or_published_batch_is_left_alone(
    submit: Callable[..., str], write: Any, completion: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(2)
    write(batch, "w", completion(0))
    assert not sealing.seal(batch, ledger, folders)
    assert not sealing.seal("nobody", ledger, folders)
    assert not (folders.outputs / "b.jsonl").exists()
    write(batch, "w", completion(1))
    assert sealing.seal(batch, ledger, folders)
    assert not sealing.seal(batch, ledger, folders)


# Text


def test_text_input_also_gives_text_with_prompts_quoted(
    submit: Callable[..., str], write: Any, completion: Any, failure: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(2, kind="txt", source="b.txt")
    write(batch, "w", failure(1, "too hot"), completion(0, "an answer\nof two lines", prompt="two\nlines"))
    sealing.seal(batch, ledger, folders)
    expected = "> two\n> lines\nan answer\nof two lines\n\n> prompt 1\n! model_error: too hot\n\n"
    assert (folders.outputs / "b.txt").read_text() == expected


def test_a_file_that_is_one_prompt_gives_its_answer_alone(
    submit: Callable[..., str], write: Any, completion: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(1, kind="txt", source="b.txt", txt_mode="file")
    write(batch, "w", completion(0, "the answer"))
    sealing.seal(batch, ledger, folders)
    assert (folders.outputs / "b.txt").read_text() == "the answer\n"


def test_json_lines_input_gives_no_text(mixed: Callable[..., str], ledger: Ledger, folders: Folders) -> None:
    sealing.seal(mixed(), ledger, folders)
    assert not (folders.outputs / "b.txt").exists()


# The source


def test_the_source_is_put_away_without_overwriting(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    (folders.processed / "b.jsonl").write_text("an earlier one")
    sealing.seal(mixed(), ledger, folders)
    assert (folders.processed / "b.jsonl").read_text() == "an earlier one"
    assert (folders.processed / "b-2.jsonl").read_text() == "the source\n"
    assert list(folders.claimed.iterdir()) == []


# Crashes


def test_a_server_that_forgot_its_last_second_gets_the_same_batch_again(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power went after publishing, before Redis had synced the last marks and the closing."""
    monkeypatch.setattr(sealing, "SYNCED_S", 10.0)
    batch = mixed()
    remembered = {key: redis.dump(key) for key in redis.keys("dllm:*")}
    sealing.seal_ready(ledger, folders)
    before = published(folders)
    redis.flushall()
    for key, value in remembered.items():
        redis.restore(key, 0, value)
    sealing.seal_ready(ledger, folders)
    assert ledger.get(batch).state is BatchState.DONE
    assert published(folders) == before


STEPS: list[tuple[Any, str, int]] = [
    (Ledger, "bitmaps", 0),
    (sealing, "_admit_losses", 0),
    (paths, "publish", 0),
    (paths, "publish", 1),
    (paths, "publish", 2),
    (paths, "publish", 3),
    (paths, "publish", 4),
    (sealing, "_put_source_away", 0),
    (paths.os, "link", 0),
    (paths, "move", 0),
    (Path, "rmdir", 0),
    (Ledger, "close", 0),
    (stores.Disk, "clear", 0),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name", "call"), STEPS, ids=[f"{name}-{call}" for _, name, call in STEPS])
def test_a_crash_at_any_step_leads_to_the_same_end(
    mixed: Callable[..., str],
    ledger: Ledger,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    batch = mixed(kind="txt", source="b.txt", output_format="csv")
    with monkeypatch.context() as dying:
        dying_at(owner, name, call, after, dying)
        with pytest.raises(Crash):
            sealing.seal_ready(ledger, folders)
    sealing.seal_ready(ledger, folders)
    assert ledger.get(batch).state is BatchState.DONE
    found = published(folders)
    assert found.keys() == {
        "batch_outputs/b.jsonl",
        "batch_outputs/b.errors.jsonl",
        "batch_outputs/b.txt",
        "batch_outputs/b.csv",
        "batch_outputs/b.summary.json",
        "batch_processed/b.txt",
    }
    assert outputs(folders) == ["output 0", "output 2", "output 4"]
    assert len(lines(folders.outputs / "b.errors.jsonl")) == 2
    assert found["batch_processed/b.txt"] == b"the source\n"
    assert list(folders.claimed.iterdir()) == []
    assert list(folders.segments.iterdir()) == []


def test_the_outputs_appear_last(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    publish = paths.publish
    monkeypatch.setattr(paths, "publish", lambda part, target: (order.append(target.name), publish(part, target)))
    sealing.seal(mixed(kind="txt", source="b.txt", output_format="openai"), ledger, folders)
    forms = ["b.openai.errors.jsonl", "b.openai.jsonl"]
    assert order == ["b.errors.jsonl", "b.txt", *forms, "b.summary.json", "b.jsonl"]


def test_of_many_sealers_at_once_one_publishes(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = mixed()
    together, results, count = threading.Barrier(4), [], []
    close = Ledger.close
    monkeypatch.setattr(Ledger, "close", lambda self, batch, *rest: (count.append(batch), close(self, batch, *rest)))

    def seal() -> None:
        together.wait()
        results.append(sealing.seal(batch, ledger, folders))

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True]
    assert count == [batch]
    assert outputs(folders) == ["output 0", "output 2", "output 4"]


def test_a_sealer_that_was_taken_over_touches_nothing_more(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = mixed()
    merge = sealing.Merge

    def stalled(*args: Any) -> Any:
        """Before the first sealer reads the segments, its lease runs out and another one does all the work."""
        monkeypatch.setattr(sealing, "Merge", merge)
        redis.delete(ledger.key(batch, "lock:seal"))
        assert sealing.seal(batch, ledger, folders)
        return merge(*args)

    monkeypatch.setattr(sealing, "Merge", stalled)
    assert not sealing.seal(batch, ledger, folders)
    assert ledger.get(batch).counts == Counts(total=5, submitted=5, done=3, failed=2)
    assert outputs(folders) == ["output 0", "output 2", "output 4"]


def test_a_batch_that_cannot_be_published_holds_up_no_other(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    mixed(batch="a")
    mixed(batch="b")
    (folders.outputs / "a.jsonl").mkdir()
    assert sealing.seal_ready(ledger, folders) == ["b"]
    assert ledger.open_batches() == ["a"]
    (folders.outputs / "a.jsonl").rmdir()
    assert sealing.seal_ready(ledger, folders) == ["a"]


def test_segments_written_after_publishing_are_cleared_away_and_others_kept(
    mixed: Callable[..., str], submit: Callable[..., str], write: Any, completion: Any, ledger: Ledger, folders: Folders
) -> None:
    sealing.seal(mixed(), ledger, folders)
    write("b", "late", completion(0, "too late"))
    write(submit(2, batch="open"), "w", completion(0))
    (folders.segments / "stranger").mkdir()
    sealing.seal_ready(ledger, folders)
    assert sorted(path.name for path in folders.segments.iterdir()) == ["open", "stranger"]
    assert outputs(folders)[0] == "output 0"


# Errors and retry


@pytest.fixture
def failed_batch(
    submit: Callable[..., str],
    folders: Folders,
    redis: Redis,
    ledger: Ledger,
    worker_settings: Callable[..., WorkerSettings],
    completion: Any,
    failure: Any,
) -> str:
    """A batch of five, not yet published: rows 1 and 3 failed in a worker, row 4 was unreadable, the rest is done."""
    batch = submit(5, unreadable=(4,))
    intake = Intake(redis, ledger, worker_settings(name="w"))
    codes = {1: ErrorCode.MODEL_ERROR, 3: ErrorCode.OUT_OF_MEMORY}
    with SegmentWriter(folders, batch, "w") as segment:
        segment.append([failure(4, code=ErrorCode.BAD_JSON)])
        for taken in intake.take(5):
            row = failure(taken.index, code=codes[taken.index]) if taken.index in codes else completion(taken.index)
            segment.append([row])
            if taken.index in codes:
                intake.fail(taken, PromptFailure(codes[taken.index], "it failed"))
            else:
                intake.finish([taken])
    return batch


def waiting(redis: Redis) -> list[str]:
    return waiting_ids(redis)


@pytest.mark.parametrize("sealed", [False, True])
def test_errors_are_listed_before_and_after_publishing(
    failed_batch: str, ledger: Ledger, folders: Folders, sealed: bool
) -> None:
    if sealed:
        sealing.seal(failed_batch, ledger, folders)
    rows = list(sealing.errors(failed_batch, ledger, folders))
    assert [(row.index, row.error.code) for row in rows] == [(1, "model_error"), (3, "out_of_memory"), (4, "bad_json")]
    assert list(sealing.errors("nobody", ledger, folders)) == []


@pytest.mark.parametrize("sealed", [False, True])
def test_a_retry_queues_failed_rows_again_and_the_next_seal_replaces_their_errors(
    failed_batch: str,
    ledger: Ledger,
    folders: Folders,
    redis: Redis,
    write: Any,
    completion: Any,
    failure: Any,
    worker_settings: Callable[..., WorkerSettings],
    sealed: bool,
) -> None:
    if sealed:
        assert sealing.seal(failed_batch, ledger, folders)
    assert sealing.retry(failed_batch, None, ledger, folders, redis) == 2
    assert waiting(redis) == ["b-1", "b-3"]
    assert ledger.get("b").state is BatchState.RUNNING
    assert ledger.get("b").counts == Counts(total=5, submitted=5, done=2, failed=1)
    assert not sealing.seal(failed_batch, ledger, folders)
    intake = Intake(redis, ledger, worker_settings(name="again"))
    first, second = intake.take(5)
    assert (first.index, first.attempt, second.index, second.attempt) == (1, 1, 3, 1)
    with SegmentWriter(folders, "b", "again") as segment:
        segment.append([completion(1, "at last"), failure(3, "still not")])
    intake.finish([first])
    intake.fail(second, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
    assert sealing.seal(failed_batch, ledger, folders)
    told = json.loads((folders.outputs / "b.summary.json").read_text())
    assert (told["rows"]["done"], told["errors"]) == (3, {"bad_json": 1, "model_error": 1})
    assert outputs(folders) == ["output 0", "at last", "output 2"]
    errors = lines(folders.outputs / "b.errors.jsonl")
    assert [(row["id"], row["error"]["message"]) for row in errors] == [("id-3", "still not"), ("id-4", "it failed")]
    assert [path.name for path in folders.processed.iterdir()] == ["b.jsonl"]


def test_no_errors_file_is_left_when_a_retry_leaves_no_failure(
    submit: Callable[..., str],
    folders: Folders,
    redis: Redis,
    ledger: Ledger,
    completion: Any,
    failure: Any,
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    submit(1)
    intake = Intake(redis, ledger, worker_settings(name="w"))
    with SegmentWriter(folders, "b", "w") as segment:
        (row,) = intake.take(1)
        segment.append([failure(0)])
        intake.fail(row, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
        sealing.seal("b", ledger, folders)
        assert (folders.outputs / "b.errors.jsonl").exists()
        sealing.retry("b", None, ledger, folders, redis)
        (row,) = intake.take(1)
        segment.append([completion(0)])
        intake.finish([row])
    assert sealing.seal("b", ledger, folders)
    assert not (folders.outputs / "b.errors.jsonl").exists()
    assert outputs(folders) == ["output 0"]


def test_a_retry_may_be_limited_to_some_codes(
    failed_batch: str, ledger: Ledger, folders: Folders, redis: Redis
) -> None:
    sealing.seal(failed_batch, ledger, folders)
    assert sealing.retry(failed_batch, {ErrorCode.OUT_OF_MEMORY}, ledger, folders, redis) == 1
    assert waiting(redis) == ["b-3"]


def test_rows_without_a_job_are_not_queued_and_the_batch_stays_published(
    failed_batch: str, ledger: Ledger, folders: Folders, redis: Redis
) -> None:
    sealing.seal(failed_batch, ledger, folders)
    redis.delete(Job.key_for("b-1"), Job.key_for("b-3"))
    before = published(folders)
    assert sealing.retry(failed_batch, None, ledger, folders, redis) == 0
    assert ledger.get("b").state is BatchState.DONE
    assert published(folders) == before


def test_a_retry_that_died_before_queueing_changes_nothing(
    failed_batch: str, ledger: Ledger, folders: Folders, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing.seal(failed_batch, ledger, folders)
    before = published(folders)

    def die(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as dying:
        dying.setattr(Ledger, "reopen", die)
        with pytest.raises(Crash):
            sealing.retry(failed_batch, None, ledger, folders, redis)
    sealing.seal_ready(ledger, folders)
    assert published(folders) == before
    assert sealing.retry(failed_batch, None, ledger, folders, redis) == 2


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("{}\n" * 9)])
def test_published_files_that_were_changed_are_not_mistaken_for_ours(
    failed_batch: str, ledger: Ledger, folders: Folders, redis: Redis, change: Callable[[Path], object]
) -> None:
    sealing.seal(failed_batch, ledger, folders)
    change(folders.outputs / "b.jsonl")
    with pytest.raises(UsageError, match="not as it was published"):
        sealing.retry(failed_batch, None, ledger, folders, redis)
    assert ledger.get("b").state is BatchState.DONE
    assert waiting(redis) == []


def test_a_retry_of_an_unknown_batch_is_refused(ledger: Ledger, folders: Folders, redis: Redis) -> None:
    with pytest.raises(UsageError, match="no batch 'nobody'"):
        sealing.retry("nobody", None, ledger, folders, redis)


def test_a_retry_waits_for_no_one_forever(
    failed_batch: str, ledger: Ledger, folders: Folders, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "WAIT_S", 0.1)
    assert ledger.lock(failed_batch, "seal").acquire()
    with pytest.raises(UsageError, match="being published"):
        sealing.retry(failed_batch, None, ledger, folders, redis)
