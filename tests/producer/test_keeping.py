"""What becomes of a batch that is over: another form of it, or nothing at all."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from click.testing import Result
from redis import Redis

from contract import deleting, sealing
from contract.errors import PromptFailure, UsageError
from contract.ledger import BatchState, Ledger, Mark
from contract.paths import Folders
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from tests.conftest import completion_row, failure_row
from tests.producer.conftest import PRODUCER
from worker.intake import Intake

Run = Callable[..., Result]


@pytest.fixture
def published(
    run: Run,
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    tmp_path: Path,
    worker_settings: Callable[..., WorkerSettings],
) -> Callable[..., str]:
    """Submit a file of four rows, the third of them unreadable, and end it: rows 0 and 3 done, row 1 failed."""

    def make(name: str = "own", seal: bool = True) -> str:
        file = tmp_path / f"{name}.jsonl"
        file.write_text('{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n{\n{"id": "c", "prompt": "3"}\n')
        batch = run("submit", file, *(["--force"] if seal else [])).stdout.strip()
        with Intake(redis, ledger, worker_settings()) as intake, SegmentWriter(folders, batch, "w") as segment:
            for taken in intake.take(10):
                if taken.batch != batch:
                    continue
                if taken.index == 1:
                    segment.append([failure_row(1, id="b")])
                    intake.fail(taken, PromptFailure("out_of_memory", "it failed"))
                elif seal or taken.index == 0:
                    segment.append([completion_row(taken.index, id=taken.job.id, metadata={"topic": "x"})])
                    intake.finish([taken])
        if seal:
            sealing.seal(batch, ledger, folders)  # unless the worker did, which looks after all batches
            assert [record.state for record in ledger.get_many([batch])] == [BatchState.DONE]
        return batch

    return make


def producer(folders: Folders, redis_url: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*PRODUCER, *map(str, words), "--root", str(folders.root), "--redis-url", redis_url]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **{"stdin": subprocess.DEVNULL, **options}
    )


def keys_of(redis: Redis, batch: str) -> list[bytes]:
    """Keys that name the batch, and keys in which it stands."""
    named = [key for key in redis.keys("*") if batch.encode() in key]
    sets = {"zset": lambda key: redis.zrange(key, 0, -1), "set": redis.smembers, "hash": lambda key: redis.hvals(key)}
    holding = [
        key
        for key in redis.keys("*")
        if (kind := redis.type(key).decode()) in sets and any(batch.encode() in one for one in sets[kind](key))
    ]
    return named + holding


# Export


def test_export_as_a_process_writes_a_table_of_all_rows_in_input_order(
    published: Callable[..., str], folders: Folders, redis_url: str, tmp_path: Path
) -> None:
    batch, target = published(), tmp_path / "out.csv"
    done = producer(folders, redis_url, "export", batch, "--format", "csv", "--output-file", target)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{target}\n", "4 rows written\n")
    with target.open(newline="") as stream:
        found = [(row["id"], row["output"], row["error_code"]) for row in csv.DictReader(stream)]
    assert found == [("a", "output 0", ""), ("b", "", "model_error"), ("2", "", "bad_json"), ("c", "output 3", "")]
    assert not (folders.outputs / "own.csv").exists()


def test_export_in_every_form_is_what_would_have_been_published(
    run: Run, published: Callable[..., str], folders: Folders, tmp_path: Path
) -> None:
    batch = published()
    files: dict[str, list[str]] = {}
    for form in ("jsonl", "parquet", "openai"):
        target = tmp_path / f"out.{form}"
        told = json.loads(run("export", batch, "--format", form, "--output-file", target, "--json").stdout)
        assert (told["batch"], told["format"], told["rows"]) == (batch, form, 4)
        files[form] = told["files"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["a", "b", "2", "c"]
    assert lines[0] == json.loads((folders.outputs / "own.jsonl").read_text().splitlines()[0])
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").column("id").to_pylist() == ["a", "b", "2", "c"]
    assert files["openai"] == [str(tmp_path / "out.errors.openai"), str(tmp_path / "out.openai")]
    answered = [json.loads(line) for line in (tmp_path / "out.openai").read_text().splitlines()]
    assert [line["custom_id"] for line in answered] == ["a", "c"]
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith(".out")] == []


def test_what_cannot_be_exported_is_refused_with_what_to_do(
    run: Run, published: Callable[..., str], folders: Folders, tmp_path: Path
) -> None:
    running = published("running", seal=False)
    target = tmp_path / "out.csv"
    for words, says in (
        ((running, "--format", "csv", "--output-file", target), "is not published yet: `producer results`"),
        ((running, "--format", "cvs", "--output-file", target), "(did you mean 'csv'?)"),
        (("nobody", "--format", "csv", "--output-file", target), "no batch 'nobody'"),
    ):
        done = run("export", *words)
        assert done.exit_code == 2
        assert says in done.stderr
    batch = published()
    done = run("export", batch, "--format", "csv", "--output-file", tmp_path / "nowhere" / "out.csv")
    assert "there is no folder" in done.stderr
    (folders.outputs / "own.jsonl").unlink()
    done = run("export", batch, "--format", "csv", "--output-file", target)
    assert done.exit_code == 2
    assert "is not as it was published" in done.stderr
    assert not target.exists()


# Delete


def test_delete_as_a_process_leaves_nothing_of_a_batch_but_its_files(
    published: Callable[..., str], folders: Folders, redis: Redis, redis_url: str, ledger: Ledger
) -> None:
    batch, other = published(), published("other")
    files = {file for folder in (folders.outputs, folders.processed) for file in folder.rglob("*") if file.is_file()}
    done = producer(folders, redis_url, "delete", batch, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{batch} deleted: its record, 1 failed job\n"), done.stderr
    assert keys_of(redis, batch) == []
    assert [record.spec.batch for record in ledger.newest()] == [other]
    assert {entry.name for entry in folders.segments.iterdir()} <= {other}
    assert all(file.exists() for file in files if batch not in str(file))
    assert sealing.retry(other, None, ledger, folders, redis) == 1
    again = producer(folders, redis_url, "delete", batch, "--yes")
    assert again.returncode == 2
    assert f"no batch '{batch}'" in again.stderr


def test_with_files_its_own_go_and_others_stay(run: Run, published: Callable[..., str], folders: Folders) -> None:
    batch, other = published(), published("own")
    told = json.loads(run("delete", batch, "--files", "--yes", "--json").stdout)
    assert told["jobs"] == 1
    assert sorted(Path(file).name for file in told["files"]) == [
        "own.errors.jsonl",
        "own.jsonl",
        "own.jsonl",
        "own.summary.json",
    ]
    left = [file.name for folder in (folders.outputs, folders.processed) for file in folder.iterdir() if file.is_file()]
    assert sorted(left) == ["own-2.errors.jsonl", "own-2.jsonl", "own-2.jsonl", "own-2.summary.json"]
    assert run("results", other).exit_code == 0
    assert published("own") not in (batch, other)
    assert (folders.outputs / "own.jsonl").exists()  # the name is free again


def test_a_batch_that_is_not_over_is_not_deleted(run: Run, published: Callable[..., str], ledger: Ledger) -> None:
    batch = published(seal=False)
    done = run("delete", batch, "--yes")
    assert done.exit_code == 2
    assert f"is not over: wait for it, or end it with `producer cancel {batch}`" in done.stderr
    assert run("cancel", batch).exit_code == 0
    assert run("delete", batch, "--yes").exit_code == 0
    assert ledger.newest() == []


def test_one_that_is_opened_again_at_that_moment_is_not_forgotten(
    published: Callable[..., str], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = published()

    def reopened(*_: object) -> int:
        ledger.reopen(batch, [1], lambda pipe: None)
        return 0

    monkeypatch.setattr(deleting, "discard", reopened)
    with pytest.raises(UsageError, match="opened again"):
        deleting.delete(batch, ledger, folders, with_files=False)
    assert ledger.get(batch) is not None
    assert ledger.bitmap(batch, Mark.DONE) != b""


def test_a_deletion_that_dies_on_the_way_is_done_again(
    published: Callable[..., str], ledger: Ledger, folders: Folders, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = published()
    with monkeypatch.context() as dying:
        dying.setattr(ledger, "forget", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            deleting.delete(batch, ledger, folders, with_files=True)
    assert deleting.delete(batch, ledger, folders, with_files=True).files == []
    assert keys_of(redis, batch) == []


def test_it_asks_before_it_deletes(
    run: Run, published: Callable[..., str], folders: Folders, redis_url: str, ledger: Ledger
) -> None:
    batch = published()
    asked = run("delete", batch)
    assert asked.exit_code == 2
    assert "--yes is needed where nobody can be asked" in asked.stderr
    for answer, stays in (("n", True), ("y", False)):
        ours, theirs = pty.openpty()
        os.write(ours, f"{answer}\n".encode())
        done = producer(folders, redis_url, "delete", batch, "--files", stdin=theirs)
        os.close(theirs)
        os.close(ours)
        assert f"delete {batch} (own.jsonl, 2 done, 2 failed) and 4 files? [y/N]" in done.stderr
        assert (done.returncode, ledger.get(batch) is not None) == (int(stays), stays)
