"""Submitting the same again goes on with the batch there is, whoever else does so at that moment."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import Result
from redis import Redis

from contract import cancelling, sealing
from contract.errors import DllmError, PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import Batch, BatchState, Ledger
from contract.paths import Folders
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims, content
from tests.conftest import batch_spec, completion_row, failure_row, waiting_ids
from tests.producer.conftest import PRODUCER
from worker.intake import Intake

Run = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three good rows and a bad one."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n{\n{"id": "c", "prompt": "3"}\n')
    return path


@pytest.fixture
def work(ledger: Ledger, folders: Folders, worker_settings: Callable[..., WorkerSettings]) -> Callable[..., None]:
    """Answer up to `most` prompts that wait; those with an id in `failing` fail. Publishes what is complete."""

    def answer(most: int = 10, failing: str = "") -> None:
        intake = Intake(ledger.redis, ledger, worker_settings(name="w"))
        for row in intake.take(most):
            with SegmentWriter(folders, row.batch, "w") as segment:
                if row.job.id in failing:
                    segment.append([failure_row(row.index, id=row.job.id)])
                    intake.fail(row, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
                else:
                    told = {"id": row.job.id, "metadata": row.job.metadata}
                    segment.append([completion_row(row.index, f"answer to {row.job.prompt}", **told)])
                    intake.finish([row])
        sealing.seal_ready(ledger, folders)

    return answer


def submitted(run: Run, *words: object) -> str:
    result = run("submit", *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def only(ledger: Ledger) -> Batch:
    (batch,) = ledger.newest()
    return batch


def answers(folders: Folders) -> list[str]:
    return [json.loads(line)["output"] for line in (folders.outputs / "own.jsonl").read_text().splitlines()]


def test_the_same_again_is_the_same_batch_and_rows_that_wait_or_run_are_left(
    run: Run, file: Path, ledger: Ledger, redis: Redis, work: Any
) -> None:
    batch = submitted(run, file)
    work(1)
    again = run("submit", file, "--priority", "high")
    assert (again.exit_code, again.stdout) == (0, f"{batch}\n")
    told = f"{file} was submitted before as {batch}: 1 of 4 rows are done, 2 wait or run"
    assert f"{told}, 1 cannot run again (`producer failed {batch}` says why); --force makes a new batch" in again.stderr
    assert len(waiting_ids(redis)) == 2
    assert only(ledger).counts.submitted == 4


def test_failed_rows_run_again_and_the_batch_is_published_anew(
    run: Run, file: Path, ledger: Ledger, folders: Folders, redis: Redis, work: Any
) -> None:
    batch = submitted(run, file)
    work(failing="ab")
    assert only(ledger).state is BatchState.DONE
    again = json.loads(run("submit", "--json", file).stdout)["batches"]
    (told,) = again
    assert (told["batch"], told["new"], told["queued_again"]) == (batch, False, 2)
    assert (told["status"]["state"], told["status"]["done"]) == ("running", 1)
    assert sorted(waiting_ids(redis)) == [f"{batch}-0", f"{batch}-1"]
    work()
    assert answers(folders) == ["answer to 1", "answer to 2", "answer to 3"]
    assert only(ledger).state is BatchState.DONE


def test_what_is_done_is_not_run_again(run: Run, file: Path, ledger: Ledger, redis: Redis, work: Any) -> None:
    file.write_text('{"id": "a", "prompt": "1"}\n')
    batch = submitted(run, file)
    work()
    again = run("submit", "--wait", file)
    assert (again.exit_code, again.stdout) == (0, f"{batch}\n")
    assert f"{file} was submitted before as {batch}: 1 of 1 rows are done; --force" in again.stderr
    assert "1 done, 0 failed" in again.stderr
    assert waiting_ids(redis) == []


@pytest.mark.parametrize("published", [False, True])
def test_cancelled_rows_are_read_again_from_the_file(
    run: Run, file: Path, ledger: Ledger, folders: Folders, redis: Redis, work: Any, published: bool
) -> None:
    batch = submitted(run, file)
    work(1)
    if published:
        cancelling.cancel(batch, ledger, folders)
        assert only(ledger).state is BatchState.DONE
    else:
        cancelling.cancel_rows(batch, ["b"], ledger, folders)
    again = run("submit", file)
    assert again.stdout == f"{batch}\n"
    assert f"{2 if published else 1} that had failed or were cancelled are queued again" in again.stderr
    assert sorted(waiting_ids(redis)) == [f"{batch}-1", f"{batch}-3"]
    work()
    assert answers(folders) == ["answer to 1", "answer to 2", "answer to 3"]
    counts = only(ledger).counts
    assert (counts.done, counts.failed, counts.cancelled) == (3, 1, 0)


def test_force_other_parameters_and_other_content_make_new_batches(run: Run, file: Path, ledger: Ledger) -> None:
    first = submitted(run, file)
    others = [submitted(run, file, "--force"), submitted(run, file, "--seed", "5")]
    others.append(submitted(run, file, "--output-format", "csv"))
    others.append(submitted(run, file, "--model", "other"))
    file.write_text(file.read_text() + '{"prompt": "4"}\n')
    others.append(submitted(run, file))
    assert len({first, *others}) == 6
    assert submitted(run, file) == others[-1]


def test_what_makes_other_prompts_of_the_same_bytes_makes_a_new_batch(run: Run, tmp_path: Path) -> None:
    file, template, beside = tmp_path / "a.csv", tmp_path / "t.txt", tmp_path / "a.params.yaml"
    file.write_text("prompt,other,id\none,two,x\n")
    template.write_text("{other}?")
    made = [submitted(run, file), submitted(run, file, "--prompt-column", "other")]
    made.append(submitted(run, file, "--template", template))
    assert submitted(run, file, "--template", template) == made[-1]
    template.write_text("{other}!")
    made.append(submitted(run, file, "--template", template))
    beside.write_text("seed: 3\n")
    made.append(submitted(run, file))
    assert submitted(run, file) == made[-1]
    beside.write_text("seed: 4\n")
    made.append(submitted(run, file))
    shutil.copy(file, tmp_path / "a.txt")
    made.append(submitted(run, tmp_path / "a.txt"))
    assert len(set(made)) == 7
    beside.unlink()
    assert submitted(run, file) == made[0]


def as_csv(file: Path) -> None:
    file.write_text("id,prompt,topic\na,1,x\nb,2,y\nc,3,z\n")


def as_packed_csv(file: Path) -> None:
    file.write_bytes(gzip.compress(b"id,prompt,topic\na,1,x\nb,2,y\nc,3,z\n"))


def as_parquet(file: Path) -> None:
    table = {"id": ["a", "b", "c"], "prompt": ["1", "2", "3"], "topic": ["x", "y", "z"]}
    pyarrow.parquet.write_table(pyarrow.table(table), file)


@pytest.mark.parametrize(
    ("name", "write", "form"),
    [("c.csv", as_csv, "parquet"), ("c.csv.gz", as_packed_csv, "openai"), ("c.parquet", as_parquet, "csv")],
)
def test_tables_in_folders_go_on_and_run_again_as_files_do(
    run: Run, tmp_path: Path, folders: Folders, redis: Redis, work: Any, name: str, write: Any, form: str
) -> None:
    below = tmp_path / "data" / "below"
    below.mkdir(parents=True)
    write(below / name)
    (below / "c.params.yaml").write_text("seed: 3\n")
    words = (tmp_path / "data", "--recursive", "--output-format", form)
    batch = submitted(run, *words)
    work(1, failing="a")
    assert run("cancel", batch, "--id", "c").exit_code == 0
    assert submitted(run, *words) == batch
    assert sorted(waiting_ids(redis)) == [f"{batch}-0", f"{batch}-1", f"{batch}-2"]
    work()
    place = folders.outputs / "below"
    rows = [json.loads(line) for line in (place / "c.jsonl").read_text().splitlines()]
    assert [(row["id"], row["output"], row["metadata"]) for row in rows] == [
        ("a", "answer to 1", {"topic": "x"}),
        ("b", "answer to 2", {"topic": "y"}),
        ("c", "answer to 3", {"topic": "z"}),
    ]
    assert {file.name for file in place.iterdir()} == {
        "c.jsonl",
        "c.summary.json",
        "c.openai.jsonl" if form == "openai" else f"c.{form}",
    }
    assert json.loads(run("results", batch, "--json").stdout)["files"][0] == str(place / "c.jsonl")
    again = run("rerun", batch, "--param", "seed=4")
    assert again.exit_code == 0, again.stderr
    work()
    assert run("results", again.stdout.strip()).stdout.count('"topic"') == 3
    assert (place / "c-2.jsonl").exists()
    second = name.replace("c", "c-2", 1)
    assert {file.name for file in (folders.processed / "below").iterdir()} == {name, second, "c.params.yaml"}


def test_a_forced_batch_is_the_one_that_the_next_goes_on_with(run: Run, file: Path) -> None:
    first, second = submitted(run, file), submitted(run, file, "--force")
    assert first != second
    assert submitted(run, file) == second


def test_a_batch_that_was_cancelled_while_its_file_was_read_is_not_gone_on_with(
    run: Run, file: Path, ledger: Ledger, folders: Folders, producer_settings: Callable[..., ProducerSettings]
) -> None:
    claims = Claims(producer_settings(), ledger)
    spec, new = claims.snapshot_once(file)
    assert new
    cancelling.cancel(spec.batch, ledger, folders)
    assert submitted(run, file) != spec.batch


def test_a_submission_that_was_interrupted_goes_on(
    run: Run, file: Path, ledger: Ledger, producer_settings: Callable[..., ProducerSettings]
) -> None:
    spec, _ = Claims(producer_settings(), ledger).snapshot_once(file)
    assert submitted(run, file) == spec.batch
    assert only(ledger).counts.total == 4


def test_names_hours_and_prices_do_not_make_another_content(file: Path) -> None:
    spec = batch_spec()
    same = content(file, batch_spec(batch="c", output="d", source="e.jsonl", priority="high", created_at=1.0))
    assert content(file, spec) == same
    assert content(file, batch_spec(txt_mode="file")) != same


def test_of_two_who_submit_the_same_at_once_one_makes_the_batch(
    file: Path, ledger: Ledger, folders: Folders, producer_settings: Callable[..., ProducerSettings]
) -> None:
    together, found = threading.Barrier(4), []

    def submit() -> None:
        claims = Claims(producer_settings(), ledger)
        together.wait()
        found.append(claims.snapshot_once(file))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.newest()) == 1
    assert sorted(new for _, new in found) == [False, False, False, True]
    assert len({spec.batch for spec, _ in found}) == 1
    assert [folder.name for folder in folders.claimed.iterdir()] == [only(ledger).spec.batch]
    assert only(ledger).spec.output in {"own", "own-2", "own-3", "own-4"}


def test_a_batch_that_is_made_while_ours_is_copied_is_the_one_that_counts(
    file: Path,
    ledger: Ledger,
    folders: Folders,
    producer_settings: Callable[..., ProducerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, quick = (Claims(producer_settings(), ledger) for _ in range(2))
    copy, made = shutil.copyfile, []

    def slowly(source: Path, target: Path) -> None:
        copy(source, target)
        if not made:
            made.append(None)
            made.append(quick.snapshot(file))

    monkeypatch.setattr("producer.claims.shutil.copyfile", slowly)
    assert slow.snapshot_once(file) == (made[1], False)
    first = made[1]
    assert [folder.name for folder in folders.claimed.iterdir()] == [first.batch]
    assert (first.output, quick.snapshot(file).output) == ("own-2", "own")  # the name of the other is free again


def test_processes_that_submit_the_same_at_once_print_one_batch(
    file: Path, folders: Folders, redis: Redis, redis_url: str, ledger: Ledger
) -> None:
    command = [*PRODUCER, "submit", str(file), "--root", str(folders.root), "--redis-url", redis_url]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert {out for out, _ in printed} == {f"{only(ledger).spec.batch}\n"}
    assert sum("was submitted before" in err for _, err in printed) == 1
    assert only(ledger).counts.total == 4
    assert len(waiting_ids(redis)) == 3


def test_a_file_that_grows_while_it_is_copied_leaves_nothing(
    file: Path,
    ledger: Ledger,
    folders: Folders,
    producer_settings: Callable[..., ProducerSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def growing(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes())
        source.write_text("more")

    monkeypatch.setattr("producer.claims.shutil.copyfile", growing)
    with pytest.raises(DllmError, match="is being written"):
        Claims(producer_settings(), ledger).snapshot_once(file)
    assert ledger.newest() == []
    assert list(folders.claimed.iterdir()) == []
