"""The command line: what it answers on stdout and stderr, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
import structlog
from click.testing import Result
from redis import Redis
from typer.testing import CliRunner

from contract import sealing, turns
from contract.jobs import Completion, ErrorCode, ErrorRow, PromptJob
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.paths import Folders
from contract.queues import queue
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings
from producer import report
from producer.cli import app
from producer.watcher import Watcher
from tests.conftest import waiting_ids
from tests.producer.conftest import PRODUCER

Run = Callable[..., Result]
Finish = Callable[..., None]


@pytest.fixture
def run(folders: Folders, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a `producer` command on the test's root and emptied server."""
    monkeypatch.setenv("DLLM_ROOT", str(folders.root))
    monkeypatch.setenv("DLLM_REDIS_URL", redis_url)
    root = logging.getLogger()
    before = root.handlers, root.level
    yield lambda *words: CliRunner().invoke(app, [str(word) for word in words])
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers, root.level = before
    structlog.reset_defaults()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three good rows and a bad one."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"id": "a", "prompt": "1"}\n{"id": "b", "prompt": "2"}\n{\n{"id": "c", "prompt": "3"}\n')
    return path


@pytest.fixture
def finish(
    ledger: Ledger, folders: Folders, completion: Callable[..., Completion], failure: Callable[..., ErrorRow]
) -> Finish:
    """Do a worker's part: end a batch's rows, those in `failed` badly, and publish it when it is complete."""

    def end(batch: str, indices: tuple[int, ...], failed: tuple[int, ...] = (), seal: bool = True) -> None:
        with SegmentWriter(folders, batch, "w") as segment, ledger.redis.pipeline() as pipe:
            segment.append([failure(index) if index in failed else completion(index) for index in indices])
            for index in indices:
                ledger.mark(pipe, batch, index, Mark.FAILED if index in failed else Mark.DONE)
            pipe.execute()
        if seal:
            sealing.seal(batch, ledger, folders)

    return end


def submitted(run: Run, *words: object) -> str:
    result = run("submit", *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


# Submitting


def test_a_batch_waits_for_its_hours_and_status_says_until_when(run: Run, file: Path, ledger: Ledger) -> None:
    result = run("submit", file, "--not-before", "2999-12-03T22:00", "--window", "22:00-06:00")
    batch = result.stdout.strip()
    assert f"{batch} waits until 2999-12-03 22:00\n" in result.stderr
    assert "waits until 2999-12-03 22:00" in run("status").stdout
    shown = run("status", batch).stdout
    assert "state      waits until 2999-12-03 22:00\n" in shown
    assert "window     22:00-06:00\n" in shown
    told = json.loads(run("status", batch, "--json").stdout)
    opens = datetime(2999, 12, 3, 22).timestamp()
    assert (told["state"], told["window"], told["waits_until"]) == ("running", "22:00-06:00", opens)
    assert json.loads(run("status", "--json").stdout)["queues"][1]["waiting"] == 3


def test_a_batch_in_its_hours_does_not_wait(run: Run, file: Path) -> None:
    result = run("submit", file, "--not-before", "2020-01-01")
    assert "waits" not in result.stderr
    told = json.loads(run("status", result.stdout.strip(), "--json").stdout)
    assert (told["window"], told["waits_until"]) == (None, None)
    assert json.loads(run("status", submitted(run, file), "--json").stdout)["waits_until"] is None


def test_wrong_hours_are_refused_with_what_would_be_right(run: Run, file: Path, ledger: Ledger) -> None:
    result = run("submit", file, "--not-before", "tonight")
    assert result.exit_code == 2
    assert "--not-before: not_before = 'tonight': give a time such as 22:00 (the next one)" in result.stderr
    result = run("submit", file, "--window", "22-6")
    assert result.exit_code == 2
    assert "--window: window = '22-6': give two different times, from and to, such as 22:00-06:00" in result.stderr
    assert ledger.newest() == []


def test_submit_prints_one_batch_id_per_file_and_nothing_else(run: Run, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("one\n")
    result = run("submit", file, other)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("own-")
    assert second.startswith("other-")


def test_submit_tells_when_nobody_is_there_to_do_the_work(run: Run, file: Path) -> None:
    assert "no worker for model 'demo' is alive: start one with `worker run`" in run("submit", file).stderr
    told = run("submit", file, "--model", "models/llada").stderr
    assert "start one with `worker run --model models/llada`" in told


def test_flags_name_model_priority_outputs_and_parameters(
    run: Run, file: Path, queued: Callable[..., list[PromptJob]], ledger: Ledger
) -> None:
    flags = ["--name", "mine", "--model", "some/m", "--priority", "high", "--seed", "5", "--max-new-tokens", "7"]
    batch = ledger.get(submitted(run, file, *flags))
    assert batch is not None
    assert (batch.spec.output, batch.spec.model, batch.spec.priority) == ("mine", "m", "high")
    jobs = queued("m", "high")
    assert len(jobs) == 3
    assert {(job.params.seed, job.params.max_new_tokens) for job in jobs} == {(5, 7)}


def test_a_file_in_the_inbox_is_taken_rather_than_submitted_twice(
    run: Run, file: Path, folders: Folders, producer_settings: Callable[..., ProducerSettings], ledger: Ledger
) -> None:
    inside = folders.inputs / "own.jsonl"
    file.rename(inside)
    submitted(run, inside)
    assert not inside.exists()
    Watcher(producer_settings(), ledger, lambda: False).run_once()
    assert len(ledger.newest()) == 1


def test_a_link_to_a_file_is_read_like_the_file(
    run: Run, file: Path, folders: Folders, queued: Callable[..., list[PromptJob]]
) -> None:
    link = folders.inputs / "link.jsonl"
    link.symlink_to(file)
    submitted(run, link)
    assert link.is_symlink()
    assert file.exists()
    assert len(queued()) == 3


def make_nothing(path: Path) -> None:
    pass


def make_text(path: Path) -> None:
    path.write_text("one\n")


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("missing.jsonl", make_nothing, "missing.jsonl: no such file"),
        ("folder.jsonl", Path.mkdir, "not a file; name the files in it"),
        ("table.csv", make_text, "rename it to end in .txt or .jsonl"),
        ("suffixless", make_text, "unknown kind of file"),
        ("pipe.txt", os.mkfifo, "not a file"),
        ("caf\udce9.txt", make_text, r"caf\udce9.txt: its name is not UTF-8; rename it"),
    ],
)
def test_what_cannot_be_submitted_is_wrong_usage_and_nothing_is_submitted(
    run: Run, file: Path, tmp_path: Path, ledger: Ledger, name: str, make: Callable[[Path], None], says: str
) -> None:
    make(tmp_path / name)
    result = run("submit", file, tmp_path / name)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert ledger.newest() == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--priority", "hihg"], "did you mean 'high'?"),
        (["--name", "a/b"], "try 'a_b'"),
        (["--name", ""], "cannot be a file name"),
        (["--name", "x.errors"], "try 'x-errors'"),
        (["--temperature", "99"], "temperature: Input should be less than or equal to 10"),
        (["--rule", "threshhold"], "rule"),
        (["--rule", "threshold", "--denoise-steps", "4"], "denoise_steps belongs to rule 'fixed_steps'"),
        (["--factor", "0"], "factor"),
        (["--rule", "factor", "--kl-threshold", "0.1"], "kl_threshold belongs to rule 'klass'"),
        (["--rule", "klass", "--edit-threshold", "0.9"], "edit_threshold belongs to rule 'joint_threshold'"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_a_wrong_flag_is_wrong_usage(run: Run, file: Path, flags: list[str], says: str, ledger: Ledger) -> None:
    result = run("submit", file, *flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert ledger.newest() == []


def test_one_name_does_not_go_with_two_files(run: Run, file: Path) -> None:
    result = run("submit", file, file, "--name", "x")
    assert result.exit_code == 2
    assert "--name goes with one FILE" in result.stderr


# Settings


def test_a_mistyped_setting_in_the_file_is_named_with_the_nearest(run: Run, folders: Folders) -> None:
    folders.configs.mkdir()
    (folders.configs / "producer.yaml").write_text("max_queud: 5\n")
    result = run("status")
    assert result.exit_code == 2
    assert "producer.yaml: unknown setting 'max_queud' (did you mean 'max_queued'?)" in result.stderr


def test_a_mistyped_setting_in_the_environment_is_named_with_the_nearest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLLM_MAX_QUEUD", "5")
    result = run("status")
    assert result.exit_code == 2
    assert "unknown environment variable DLLM_MAX_QUEUD (did you mean DLLM_MAX_QUEUED" in result.stderr.replace("'", "")


def test_a_setting_out_of_range_is_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_SCAN_S", "0")
    result = run("status")
    assert result.exit_code == 2
    assert "scan_s" in result.stderr


def test_the_example_settings_are_the_defaults() -> None:
    text = (Path(__file__).parents[2] / "configs" / "producer.yaml").read_text()
    names = {line[2:].split(":")[0] for line in text.splitlines() if line.startswith("# ") and ": " in line}
    known = set(ProducerSettings.model_fields) - {"root", "params"}
    assert known <= names


def test_a_server_that_is_not_there_is_a_failure_in_one_line(run: Run, tmp_path: Path) -> None:
    result = run("status", "--redis-url", f"unix://{tmp_path}/nobody")
    assert result.exit_code == 1
    assert "not reachable" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


# Waiting


def soon(wait_until: Callable[..., None], ledger: Ledger, act: Callable[[Batch], None]) -> threading.Thread:
    """Act on the only batch as soon as it is submitted."""

    def work() -> None:
        wait_until(lambda: any(batch.state is BatchState.RUNNING for batch in ledger.newest()))
        act(ledger.newest()[0])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_wait_ends_well_when_every_row_is_done(
    run: Run, tmp_path: Path, ledger: Ledger, finish: Finish, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    worker = soon(wait_until, ledger, lambda batch: finish(batch.spec.batch, (0, 1)))
    result = run("submit", "--wait", tmp_path / "two.txt")
    worker.join(10)
    assert result.exit_code == 0
    assert "2 done, 0 failed" in result.stderr
    assert "two.jsonl" in result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_wait_exits_1_when_a_row_failed(
    run: Run, file: Path, ledger: Ledger, finish: Finish, wait_until: Callable[..., None]
) -> None:
    worker = soon(wait_until, ledger, lambda batch: finish(batch.spec.batch, (0, 1, 3)))
    result = run("submit", "--wait", file)
    worker.join(10)
    assert result.exit_code == 1
    assert "3 done, 1 failed" in result.stderr
    assert "`producer failed own-" in result.stderr


def test_wait_publishes_a_complete_batch_that_nobody_published(
    run: Run,
    file: Path,
    ledger: Ledger,
    folders: Folders,
    finish: Finish,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("producer.cli.SEAL_AFTER_S", 0.0)
    worker = soon(wait_until, ledger, lambda batch: finish(batch.spec.batch, (0, 1, 3), seal=False))
    assert run("submit", "--wait", file).exit_code == 1
    worker.join(10)
    assert (folders.outputs / "own.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_wait_leaves_the_batch_running(
    file: Path,
    folders: Folders,
    redis_url: str,
    ledger: Ledger,
    wait_until: Callable[..., None],
    number: signal.Signals,
) -> None:
    command = [*PRODUCER, "submit", "--wait", str(file), "--root", str(folders.root), "--redis-url", redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: any(batch.state is BatchState.RUNNING for batch in ledger.newest()))
        process.send_signal(number)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "goes on without you" in told
    assert ledger.newest()[0].state is BatchState.RUNNING


# Looking


def test_status_shows_batches_queues_and_workers(run: Run, file: Path) -> None:
    assert "no batches yet" in run("status").stdout
    batch = submitted(run, file)
    shown = run("status").stdout
    assert batch in shown
    assert "no workers: start one with `worker run`" in shown
    queue_line = next(line for line in shown.splitlines() if line.split()[:2] == ["demo", "normal"])
    assert queue_line.split()[-1] == "3"


def test_status_as_json_is_one_document(run: Run, file: Path) -> None:
    batch = submitted(run, file)
    system = json.loads(run("status", "--json").stdout)
    (shown,) = system["batches"]
    assert (shown["batch"], shown["state"], shown["total"], shown["failed"]) == (batch, "running", 4, 1)
    assert system["workers"] == []
    assert {(each["priority"], each["waiting"]) for each in system["queues"]} == {
        ("high", 0),
        ("normal", 3),
        ("low", 0),
    }
    assert json.loads(run("status", batch, "--json").stdout)["batch"] == batch


def test_status_of_a_published_batch_names_its_files(run: Run, file: Path, finish: Finish, folders: Folders) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    shown = run("status", batch).stdout
    assert str(folders.outputs / "own.jsonl") in shown
    assert str(folders.outputs / "own.errors.jsonl") in shown


@pytest.mark.parametrize("command", ["status", "results", "failed", "retry"])
def test_an_unknown_batch_is_wrong_usage_and_the_nearest_is_named(run: Run, file: Path, command: str) -> None:
    batch = submitted(run, file)
    for mistyped in (batch[:-1] + "x", "own", "ownn"):
        result = run(command, mistyped)
        assert result.exit_code == 2
        assert f"did you mean '{batch}'?" in result.stderr


def test_results_come_in_input_order_while_the_batch_runs_and_after(run: Run, file: Path, finish: Finish) -> None:
    batch = submitted(run, file)
    finish(batch, (3,))
    finish(batch, (0,))
    so_far = run("results", batch)
    assert so_far.exit_code == 0
    assert [json.loads(line)["output"] for line in so_far.stdout.splitlines()] == ["output 0", "output 3"]
    assert "2 rows so far, of 4" in so_far.stderr
    finish(batch, (1,))
    done = run("results", batch)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["output"] for row in rows] == ["output 0", "output 1", "output 3"]
    assert all("index" not in row for row in rows)
    assert "published: " in done.stderr


def test_results_of_a_batch_published_at_that_moment_are_the_published_ones(
    run: Run, file: Path, finish: Finish, ledger: Ledger, folders: Folders
) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1), seal=False)
    before = ledger.get(batch)
    assert before is not None
    finish(batch, (3,))
    rows = [json.loads(row)["output"] for row in report.outputs(before, ledger, folders)]
    assert rows == ["output 0", "output 1", "output 3"]


def test_results_can_be_written_to_a_file(run: Run, file: Path, finish: Finish, tmp_path: Path) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    result = run("results", batch, "--output", tmp_path / "copy.jsonl")
    assert result.stdout == ""
    assert len((tmp_path / "copy.jsonl").read_text().splitlines()) == 3


def test_results_that_were_moved_away_are_wrong_usage(run: Run, file: Path, finish: Finish, folders: Folders) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    (folders.outputs / "own.jsonl").unlink()
    result = run("results", batch)
    assert result.exit_code == 2
    assert "moved or deleted after the batch was published" in result.stderr


def test_failed_tells_where_why_and_what_to_do(run: Run, file: Path) -> None:
    batch = submitted(run, file)
    shown = run("failed", batch)
    assert shown.exit_code == 0
    assert "own.jsonl line 3: not JSON" in shown.stdout
    assert "bad_json: make the line one complete JSON object" in shown.stdout


def test_failed_as_json_by_code(run: Run, file: Path, finish: Finish) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3), failed=(1,))
    both = json.loads(run("failed", batch, "--json").stdout)
    assert [row["error"]["code"] for row in both["errors"]] == ["model_error", "bad_json"]
    some = json.loads(run("failed", batch, "--json", "--code", "bad_json").stdout)
    assert [row["line"] for row in some["errors"]] == [3]
    assert "no failed rows" in run("failed", batch, "--code", "out_of_memory").stdout


def test_a_mistyped_code_is_wrong_usage(run: Run, file: Path) -> None:
    result = run("failed", submitted(run, file), "--code", "bad_jsn")
    assert result.exit_code == 2
    assert "did you mean 'bad_json'?" in result.stderr


def test_what_a_terminal_would_obey_is_spelled_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "evil.jsonl").write_text('{"id": "\\u001b[31mred", "prompt": "\\u001b]0;title\\u0007", "top_k": -1}\n')
    shown = run("failed", submitted(run, tmp_path / "evil.jsonl")).stdout
    assert "\x1b" not in shown
    assert r"\x1b[31mred" in shown


def test_retry_queues_failed_rows_that_have_a_job(
    run: Run, file: Path, finish: Finish, redis: Redis, ledger: Ledger
) -> None:
    batch = submitted(run, file)
    target = queue(redis, "demo", "normal")
    job = target.fetch_job(f"{batch}-1")
    assert job is not None
    target.failed_job_registry.add(job, ttl=100)
    redis.lrem(turns.backlog(batch), 0, job.id)
    finish(batch, (0, 1, 3), failed=(1,))
    result = run("retry", batch)
    assert (result.exit_code, result.stdout) == (0, "1 row queued again\n")
    assert f"{batch}-1" in waiting_ids(redis)
    found = ledger.get(batch)
    assert found is not None
    assert (found.state, found.counts.failed) == (BatchState.RUNNING, 1)
    assert run("retry", batch, "--code", ErrorCode.BAD_JSON).stdout == "0 rows queued again\n"


def test_results_into_a_pipe_that_closes_are_no_error(
    run: Run, file: Path, finish: Finish, folders: Folders, redis_url: str
) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    command = [*PRODUCER, "results", batch, "--root", str(folders.root), "--redis-url", redis_url]
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in told
    assert "Exception" not in told


# The watching, and the server


def test_watch_once_submits_what_is_there_and_exits(run: Run, file: Path, folders: Folders, ledger: Ledger) -> None:
    file.rename(folders.inputs / file.name)
    assert run("watch", "--once").exit_code == 0
    (batch,) = ledger.newest()
    assert (batch.state, batch.counts.total) == (BatchState.RUNNING, 4)


def test_a_foreign_server_is_not_stopped(run: Run) -> None:
    result = run("stop-server")
    assert result.exit_code == 2
    assert "stop it where it was started" in result.stderr


def test_without_an_address_a_local_server_is_started_and_can_be_stopped(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DLLM_REDIS_URL")
    try:
        batch = submitted(run, file)
        assert batch in run("status").stdout
    finally:
        stopped = run("stop-server")
    assert (stopped.exit_code, stopped.stdout) == (0, "server stopped\n")
    assert run("stop-server").stdout == "no server was running\n"


def test_help_names_every_command(run: Run) -> None:
    shown = run("--help").stdout
    for command in ("watch", "submit", "status", "results", "failed", "retry", "stop-server"):
        assert command in shown
