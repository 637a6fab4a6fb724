"""The command line: what it answers on stdout and stderr, and its exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import Result
from redis import Redis

from contract import sealing
from contract.errors import PromptFailure
from contract.jobs import Completion, ErrorCode, ErrorRow, PromptJob
from contract.ledger import Batch, BatchState, Ledger, Mark
from contract.paths import Folders
from contract.queues import queue
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings, WorkerSettings
from producer import report
from producer.watcher import Watcher
from tests.conftest import completion_row, failure_row, waiting_ids
from tests.producer.conftest import PRODUCER
from worker.intake import Intake

COMMANDS = [
    "watch",
    "submit",
    "status",
    "results",
    "failed",
    "retry",
    "rerun",
    "cancel",
    "export",
    "delete",
    "doctor",
    "init",
    "serve",
    "key",
    "stop-server",
]
CONFIGS = Path(__file__).parents[2] / "configs"
Run = Callable[..., Result]
Finish = Callable[..., None]


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
    assert json.loads(run("status", "--json").stdout)["queues"][2]["waiting"] == 3


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
        ("folder.jsonl", Path.mkdir, "no .txt, .jsonl, .csv and .parquet files in it"),
        ("table.xlsx", make_text, "rename it to end in .txt, .jsonl"),
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
    other = file.with_name("other.txt")
    other.write_text("one\n")
    result = run("submit", file, other, "--name", "x")
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
    monkeypatch.setattr("producer.commands.following.SEAL_AFTER_S", 0.0)
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
        ("interactive", 0),
        ("high", 0),
        ("normal", 3),
        ("low", 0),
    }
    assert json.loads(run("status", batch, "--json").stdout)["batch"] == batch


def test_status_shows_speed_and_how_workers_stand(
    run: Run, file: Path, ledger: Ledger, redis: Redis, worker_settings: Callable[..., WorkerSettings]
) -> None:
    batch = submitted(run, file)
    vitals = {"step": 9, "rows": 2, "peak_memory_mb": 512, "model": "demo", "device": "cuda:0", "tokens_per_s": 12.5}
    intake = Intake(redis, ledger, worker_settings(name="w1"), lambda: vitals)
    rows = intake.take(2)
    intake._beat()
    intake.finish(rows[:1], {rows[0].job.job_id: 40})
    shown = run("status").stdout
    line = next(line for line in shown.splitlines() if line.startswith("w1 "))
    assert line.split()[1:8] == ["busy", "cuda:0", "demo", "2", "12.5", "512", "MB"]
    head = next(line for line in shown.splitlines() if line.startswith("BATCH"))
    assert {"TOKENS/S", "LEFT", "AGE"} <= set(head.split())
    told = json.loads(run("status", "--json").stdout)
    (worker,) = told["workers"]
    assert (worker["device"], worker["rows"], worker["tokens_per_s"]) == ("cuda:0", 2, 12.5)
    (standing,) = told["batches"]
    assert (standing["batch"], standing["output_tokens"]) == (batch, 40)
    assert standing["tokens_per_s"] > 0
    assert standing["eta_s"] > 0
    assert "tokens/s   " in run("status", batch).stdout
    intake._worker.register_death()


def test_status_watch_draws_anew_until_the_batch_is_published(
    run: Run, file: Path, folders: Folders, redis_url: str, finish: Finish
) -> None:
    batch = submitted(run, file)
    command = [*PRODUCER, "status", batch, "--watch", "--root", str(folders.root), "--redis-url", redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("batch ")
        finish(batch, (0, 1, 3))
        told, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert "state      done" in told


def test_status_watch_ends_with_an_interrupt(run: Run, file: Path, folders: Folders, redis_url: str) -> None:
    submitted(run, file)
    command = [*PRODUCER, "status", "--watch", "--root", str(folders.root), "--redis-url", redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("BATCH")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert run("status", "--watch", "--json").exit_code == 2


def test_a_wait_on_a_terminal_shows_done_failed_speed_and_time_left(
    file: Path, folders: Folders, redis: Redis, redis_url: str, ledger: Ledger, wait_until: Callable[..., None]
) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    command = [*PRODUCER, "submit", "--wait", str(file), "--root", str(folders.root), "--redis-url", redis_url]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    drawn = bytearray()

    def drawn_until(*words: str) -> None:
        def shown() -> bool:
            while select.select([screen], [], [], 0)[0]:
                drawn.extend(os.read(screen, 1 << 16))
            return all(word.encode() in drawn for word in words)

        wait_until(shown)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=environment) as process:
        wait_until(lambda: any(batch.state is BatchState.RUNNING for batch in ledger.newest()))
        with ledger.redis.pipeline() as pipe:
            ledger.mark(pipe, ledger.newest()[0].spec.batch, 0, Mark.DONE, tokens=7)
            pipe.execute()
        drawn_until("1 done, 1 failed", "tokens/s", "left")
        process.send_signal(signal.SIGINT)
        drawn_until("goes on without you", "--watch` shows how it stands")
        process.communicate(timeout=20)
    os.close(terminal)
    os.close(screen)
    assert process.returncode == 130


def test_status_of_a_published_batch_names_its_files(run: Run, file: Path, finish: Finish, folders: Folders) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    shown = run("status", batch).stdout
    assert str(folders.outputs / "own.jsonl") in shown
    assert str(folders.outputs / "own.errors.jsonl") in shown


@pytest.mark.parametrize("command", ["status", "results", "failed", "retry", "rerun", "cancel"])
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
    assert "missing: 1 that wait or run (1), 1 failed\n" in so_far.stderr
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
    rows = [json.loads(row)["output"] for row in report.outputs(before, ledger.bitmap(batch, Mark.DONE), folders)]
    assert rows == ["output 0", "output 1", "output 3"]


def test_results_as_json_say_which_rows_are_missing(run: Run, file: Path, finish: Finish, tmp_path: Path) -> None:
    (tmp_path / "ten.txt").write_text("".join(f"{number}\n" for number in range(10)))
    batch = submitted(run, tmp_path / "ten.txt")
    finish(batch, (0, 4, 5), failed=(5,))
    so_far = json.loads(run("results", batch, "--json").stdout)
    assert (so_far["state"], so_far["done"], so_far["failed"], so_far["total"]) == ("running", 2, 1, 10)
    assert so_far["missing"] == {"rows": 7, "ranges": [[1, 3], [6, 9]]}
    assert [row["id"] for row in so_far["rows"]] == ["id-0", "id-4"]
    assert "missing: 7 that wait or run (1-3, 6-9), 1 failed\n" in run("results", batch).stderr
    finish(batch, (1, 2, 3, 6, 7, 8, 9))
    done = json.loads(run("results", batch, "--json", "--output-file", tmp_path / "copy.jsonl").stdout)
    assert (done["state"], done["missing"], "rows" in done) == ("done", {"rows": 0, "ranges": []}, False)
    assert len((tmp_path / "copy.jsonl").read_text().splitlines()) == 9


def test_results_can_be_written_to_a_file(run: Run, file: Path, finish: Finish, tmp_path: Path) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    result = run("results", batch, "--output-file", tmp_path / "copy.jsonl")
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
    assert "`producer logs BATCH:ROW`" in shown.stdout
    (row,) = json.loads(run("failed", batch, "--json").stdout)["errors"]
    assert time.time() - 60 < row["error"]["at"] < time.time() + 1
    assert datetime.fromtimestamp(row["error"]["at"]).strftime("%m-%d %H:%M:%S") in shown.stdout


def test_failed_since_then(run: Run, file: Path) -> None:
    batch = submitted(run, file)
    assert "own.jsonl line 3" in run("failed", batch, "--since", "1h").stdout
    assert "no failed rows" in run("failed", batch, "--since", "2099-01-01").stdout
    assert "--since takes 24h" in run("failed", "--since", "yesterday").stderr


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
    assert r"\u001b[31mred" in shown


def test_failed_without_a_batch_lists_those_of_all_the_newest_first_and_no_more_than_asked_for(
    run: Run, file: Path, finish: Finish, ledger: Ledger
) -> None:
    first, second = submitted(run, file), submitted(run, file, "--force")
    finish(second, (0, 1, 3), failed=(1,))
    every = json.loads(run("failed", "--json").stdout)["errors"]
    assert [(row["batch"], row["index"]) for row in every] == [(second, 1), (second, 2), (first, 2)]
    some = run("failed", "--limit", "2", "--json")
    assert json.loads(some.stdout)["errors"] == every[:2]
    assert "these are the first 2" in some.stderr
    assert "first" not in run("failed", "--limit", "3").stderr
    shown = run("failed").stdout
    assert shown.index(second) < shown.index(first)
    assert "bad_json: make the line" in shown
    coded = json.loads(run("failed", "--code", "model_error", "--json").stdout)["errors"]
    assert [row["batch"] for row in coded] == [second]
    assert run("failed", "--limit", "0").exit_code == 2


def test_failed_of_all_batches_passes_over_one_whose_files_were_changed(
    run: Run, file: Path, finish: Finish, folders: Folders
) -> None:
    first, second = submitted(run, file), submitted(run, file, "--force")
    finish(second, (0, 1, 3))
    (folders.outputs / "own-2.errors.jsonl").write_text("")
    every = json.loads(run("failed", "--json").stdout)["errors"]
    assert [row["batch"] for row in every] == [first]


def test_failed_rows_are_read_one_at_a_time(
    run: Run, file: Path, ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submitted(run, file)
    rows = report.dead_letters(ledger, folders, None, None)
    monkeypatch.setattr("contract.ledger.Ledger.newest", lambda *_: pytest.fail("loaded all"))
    assert next(rows)[0] == batch
    assert next(rows, None) is None


def fail_in_worker(ledger: Ledger, settings: WorkerSettings, folders: Folders, codes: dict[str, ErrorCode]) -> None:
    """Take everything that waits; rows whose id is in `codes` fail with that code."""
    intake = Intake(ledger.redis, ledger, settings)
    while rows := intake.take(10):
        for row in rows:
            with SegmentWriter(folders, row.batch, "w") as segment:
                if row.job.id in codes:
                    segment.append([failure_row(row.index, code=codes[row.job.id], id=row.job.id)])
                    intake.fail(row, PromptFailure(codes[row.job.id], "it failed"))
                else:
                    segment.append([completion_row(row.index, id=row.job.id)])
                    intake.finish([row])


def test_retry_by_code_by_id_and_of_all_batches(
    run: Run,
    file: Path,
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    first, second = submitted(run, file), submitted(run, file, "--force")
    codes = {"a": ErrorCode.MODEL_ERROR, "b": ErrorCode.OUT_OF_MEMORY, "c": ErrorCode.MODEL_ERROR}
    settings = worker_settings(name="w")
    fail_in_worker(ledger, settings, folders, codes)
    assert run("retry", first, "--id", "b").stdout == "1 row queued again\n"
    assert waiting_ids(redis) == [f"{first}-1"]
    unknown = run("retry", first, "--id", "a", "--id", "zzz")
    assert unknown.exit_code == 2
    assert "no failed row to choose has the id 'zzz'" in unknown.stderr
    assert waiting_ids(redis) == [f"{first}-1"]
    every = json.loads(run("retry", "--all", "--code", "model_error", "--json").stdout)
    assert every["queued"] == 4
    assert {one["batch"]: one["queued"] for one in every["batches"]} == {first: 2, second: 2}
    assert sorted(waiting_ids(redis)) == sorted(
        [f"{first}-1", *(f"{batch}-{row}" for batch in (first, second) for row in (0, 3))]
    )
    fail_in_worker(ledger, settings, folders, {})
    found = ledger.get(second)
    assert found is not None
    assert (found.counts.done, found.counts.failed) == (2, 2)


@pytest.mark.parametrize("words", [[], ["BATCH", "--all"], ["--all", "--id", "x"]])
def test_retry_wants_a_batch_or_all(run: Run, words: list[str]) -> None:
    assert run("retry", *words).exit_code == 2


def test_retry_of_all_goes_on_past_a_batch_whose_files_were_changed(
    run: Run,
    file: Path,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    first, second = submitted(run, file), submitted(run, file, "--force")
    fail_in_worker(ledger, worker_settings(name="w"), folders, {"a": ErrorCode.MODEL_ERROR})
    for batch in (first, second):
        sealing.seal(batch, ledger, folders)
    (folders.outputs / "own-2.errors.jsonl").write_text("")
    result = run("retry", "--all", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["queued"], document["refused"]) == (1, [second])


# Cancelling


def test_cancel_ends_what_waits_and_publishes_what_is_done(
    run: Run, file: Path, finish: Finish, folders: Folders, redis: Redis
) -> None:
    batch = submitted(run, file)
    finish(batch, (1,))
    result = run("cancel", batch)
    assert result.exit_code == 0
    assert result.stdout == "2 rows cancelled; the batch stands at 1 done, 1 failed, 2 cancelled\n"
    assert waiting_ids(redis) == [f"{batch}-1"]  # the fixture ended a row without its job
    assert len((folders.outputs / "own.jsonl").read_text().splitlines()) == 1
    assert [file.name for file in folders.processed.iterdir()] == ["own.jsonl"]
    again = run("cancel", batch)
    assert (again.exit_code, again.stdout) == (0, "nothing to cancel: the batch was cancelled already\n")
    status = json.loads(run("status", batch, "--json").stdout)
    assert (status["done"], status["failed"], status["cancelled"], status["total"]) == (1, 1, 2, 4)
    assert "cancelled  2" in run("status", batch).stdout
    assert [row["error"]["code"] for row in json.loads(run("failed", batch, "--json").stdout)["errors"]] == ["bad_json"]
    told = json.loads(run("failed", batch, "--code", "cancelled", "--json").stdout)["errors"]
    assert [(row["id"], row["prompt"]) for row in told] == [("a", "1"), ("c", "3")]
    assert run("retry", batch).stdout == "0 rows queued again\n"


def test_cancel_of_a_published_batch_says_so(run: Run, file: Path, finish: Finish) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    result = run("cancel", batch, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["cancelled"], document["status"]["state"]) == (0, 0, "done")
    assert run("cancel", batch).stdout == "nothing to cancel: the batch was published already\n"


def test_cancel_of_single_rows(run: Run, file: Path, ledger: Ledger) -> None:
    batch = submitted(run, file)
    result = run("cancel", batch, "--id", "c", "--id", "zzz")
    assert result.exit_code == 1
    assert "1 row cancelled" in result.stdout
    assert "no row with the id 'zzz' waits or runs" in result.stderr
    found = ledger.get(batch)
    assert found is not None
    assert (found.counts.cancelled, found.state) == (1, BatchState.RUNNING)


def test_cancel_stops_a_submitter_that_waits_for_room(
    run: Run,
    tmp_path: Path,
    folders: Folders,
    redis_url: str,
    redis: Redis,
    ledger: Ledger,
    wait_until: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process reads the file at that moment; it is not read on, and the batch is published."""
    (tmp_path / "long.txt").write_text("".join(f"prompt {number}\n" for number in range(1000)))
    command = [*PRODUCER, "submit", "--wait", str(tmp_path / "long.txt")]
    environment = {**os.environ, "DLLM_MAX_QUEUED": "20"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        wait_until(lambda: any(batch.counts.submitted == 20 for batch in ledger.newest()))
        (batch,) = ledger.newest()
        result = run("cancel", batch.spec.batch)
        assert "20 rows cancelled, and no more of the file is read" in result.stdout
        _, told = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "0 done, 0 failed, 20 cancelled" in told
    assert waiting_ids(redis) == []
    found = ledger.get(batch.spec.batch)
    assert found is not None
    assert (found.state, found.counts.total, found.unread) == (BatchState.DONE, 20, True)
    assert [file.name for file in folders.processed.iterdir()] == ["long.txt"]


def test_retry_queues_failed_rows_that_have_a_job(
    run: Run, file: Path, finish: Finish, redis: Redis, ledger: Ledger
) -> None:
    batch = submitted(run, file)
    target = queue(redis, "demo", "normal")
    job = target.fetch_job(f"{batch}-1")
    assert job is not None
    target.failed_job_registry.add(job, ttl=100)
    redis.lrem(redis.names.backlog(batch), 0, job.id)
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


# Again, with other parameters


@pytest.mark.parametrize("published", [False, True])
def test_rerun_makes_a_new_batch_of_the_same_source_with_other_parameters(
    run: Run, file: Path, finish: Finish, ledger: Ledger, queued: Callable[..., list[PromptJob]], published: bool
) -> None:
    file.write_text('{"id": "a", "prompt": "1"}\n')
    first = submitted(run, file, "--seed", "1", "--max-new-tokens", "9")
    if published:
        finish(first, (0,))
    file.unlink()
    result = run("rerun", first, "--param", "seed=2", "--param", "temperature=0.5", "--model", "m", "--name", "warm")
    assert result.exit_code == 0, result.stderr
    found = ledger.get(result.stdout.strip())
    assert found is not None
    assert (found.spec.output, found.spec.model, found.counts.total) == ("warm", "m", 1)
    (job,) = queued("m")
    assert (job.params.seed, job.params.temperature, job.params.max_new_tokens) == (2, 0.5, 9)
    assert (job.id, job.prompt) == ("a", "1")
    before = ledger.get(first)
    assert before is not None
    assert before.counts.done == int(published)


def test_rerun_reads_the_batchs_own_source_and_not_another_of_that_name(
    run: Run, tmp_path: Path, finish: Finish, queued: Callable[..., list[PromptJob]]
) -> None:
    batches = []
    for text in ("first\n", "second\n"):
        (tmp_path / "own.txt").write_text(text)
        batches.append(submitted(run, tmp_path / "own.txt"))
        finish(batches[-1], (0,))
    document = json.loads(run("rerun", batches[1], "--json").stdout)
    assert document["batches"][0]["status"]["total"] == 1
    assert queued()[-1].prompt == "second"


@pytest.mark.parametrize(
    ("param", "says"), [("seed", "--param takes NAME=VALUE"), ("temprature=1", "did you mean 'temperature'?")]
)
def test_rerun_with_a_wrong_parameter_is_wrong_usage(run: Run, file: Path, param: str, says: str) -> None:
    result = run("rerun", submitted(run, file), "--param", param)
    assert result.exit_code == 2
    assert says in result.stderr


def test_rerun_without_the_source_says_what_to_do(run: Run, file: Path, finish: Finish, folders: Folders) -> None:
    batch = submitted(run, file)
    finish(batch, (0, 1, 3))
    (folders.processed / "own.jsonl").unlink()
    result = run("rerun", batch)
    assert result.exit_code == 2
    assert "own.jsonl is not there any more: put it back, or submit the file anew" in result.stderr


# Files of configuration


def test_init_writes_files_that_change_nothing_and_leaves_those_that_are_there(run: Run, folders: Folders) -> None:
    result = run("init")
    assert result.exit_code == 0
    for name in ("producer.yaml", "worker.yaml"):
        assert (folders.configs / name).read_text() == (CONFIGS / name).read_text()
    assert run("status").exit_code == 0
    (folders.configs / "worker.yaml").write_text("max_rows: 3\n")
    again = run("init")
    assert "is there already: --force writes over it" in again.stdout
    assert (folders.configs / "worker.yaml").read_text() == "max_rows: 3\n"
    document = json.loads(run("init", "--force", "--json").stdout)
    assert [Path(file).name for file in document["written"]] == ["producer.yaml", "worker.yaml"]


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
    for command in COMMANDS:
        assert command in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(run: Run, command: str) -> None:
    shown = run(command, "--help").stdout
    assert f"Example: producer {command}" in shown
    assert ("--json" in shown) == (command not in ("watch", "serve"))
