"""What can be submitted: kinds of files, folders, patterns, standard input, and parameters for one file alone."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from contract import cancelling, sealing
from contract.jobs import PromptJob
from contract.ledger import BatchSpec, Ledger, Mark
from contract.paths import Folders
from contract.segments import SegmentWriter
from contract.settings import ProducerSettings
from producer import kinds
from producer.claims import Claims, Look
from producer.inbox import Inbox
from producer.watcher import Watcher
from tests.producer.conftest import PRODUCER

Run = Callable[..., Result]
Queued = Callable[..., list[PromptJob]]


@pytest.fixture
def watch(producer_settings: Callable[..., ProducerSettings], ledger: Ledger) -> Callable[..., None]:
    return lambda **values: Watcher(producer_settings(**values), ledger, lambda: False).run_once()


def prompts(jobs: list[PromptJob]) -> list[str | None]:
    return [job.prompt for job in jobs]


# Kinds of files


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a.txt", ("a", "txt", False)),
        ("a.b.JSONL.GZ", ("a.b", "jsonl", True)),
        ("a.csv", ("a", "csv", False)),
        ("a.csv.gz", ("a", "csv", True)),
        ("a.parquet", ("a", "parquet", False)),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a", None),
        ("a.params.yaml", None),
    ],
)
def test_a_name_tells_stem_and_kind(name: str, found: tuple[str, str, bool] | None) -> None:
    assert kinds.of(name) == found


def test_every_kind_of_file_that_is_dropped_is_submitted_with_its_keys(
    folders: Folders, watch: Any, queued: Queued, ledger: Ledger
) -> None:
    (folders.inputs / "a.csv").write_text("prompt,topic\none,x\n")
    (folders.inputs / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "two", "topic": "y"}\n'))
    (folders.inputs / "c.txt.gz").write_bytes(gzip.compress(b"three\n"))
    watch()
    assert {job.prompt: job.metadata for job in queued()} == {
        "one": {"topic": "x"},
        "two": {"topic": "y"},
        "three": {},
    }
    assert {batch.spec.output for batch in ledger.newest()} == {"a", "b", "c"}


def test_columns_are_settings_and_flags(
    run: Run, folders: Folders, tmp_path: Path, watch: Any, queued: Queued, ledger: Ledger
) -> None:
    (folders.inputs / "a.csv").write_text("key;question\nk;one\n")
    watch(prompt_column="question", id_column="key", csv_delimiter=";")
    file = tmp_path / "b.csv"
    file.write_text("key\tquestion\nl\ttwo\n")
    result = run("submit", file, "--prompt-column", "question", "--id-column", "key", "--csv-delimiter", "tab")
    assert result.exit_code == 0, result.stderr
    assert [(job.id, job.prompt) for job in queued()] == [("k", "one"), ("l", "two")]


def test_settings_that_contradict_each_other_are_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\n")
    result = run("submit", tmp_path / "a.csv", "--prompt-column", "a", "--messages-column", "b")
    assert result.exit_code == 2
    assert "set messages_column or prompt_column, not both" in result.stderr
    result = run("submit", tmp_path / "a.csv", "--csv-delimiter", "ab")
    assert result.exit_code == 2
    assert "give one character, or tab" in result.stderr


def test_a_template_is_a_flag_and_a_setting(
    run: Run, folders: Folders, tmp_path: Path, watch: Any, queued: Queued
) -> None:
    template = tmp_path / "ask.txt"
    template.write_text("In {lang}: {q}\n")
    (tmp_path / "a.csv").write_text("q,lang\nwhy,en\n")
    assert run("submit", tmp_path / "a.csv", "--template", template).exit_code == 0
    (folders.inputs / "b.csv").write_text("q,lang\nwhat,de\n")
    watch(template="ask.txt")  # the root is tmp_path
    assert prompts(queued()) == ["In en: why", "In de: what"]


@pytest.mark.parametrize(("text", "says"), [(None, "No such file"), ("a\n{", "single '{' on line 2")])
def test_a_template_that_cannot_be_used_is_told_before_anything_is_submitted(
    run: Run, tmp_path: Path, ledger: Ledger, text: str | None, says: str
) -> None:
    (tmp_path / "a.csv").write_text("q\nwhy\n")
    if text is not None:
        (tmp_path / "ask.txt").write_text(text)
    result = run("submit", tmp_path / "a.csv", "--template", tmp_path / "ask.txt")
    assert result.exit_code == 2
    assert says in result.stderr
    assert ledger.newest() == []


# Folders, patterns


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in (
        "data/b.txt",
        "data/a.jsonl",
        "data/below/c.csv",
        "data/.hidden/d.txt",
        "data/.e.txt",
        "data/readme.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = {".txt": name, ".jsonl": json.dumps({"prompt": name}), ".csv": f"prompt\n{name}\n"}
        (tmp_path / name).write_text(content.get(Path(name).suffix, "no prompt") + "\n")
    (tmp_path / "data/b.params.yaml").write_text("seed: 5\n")
    return tmp_path / "data"


def test_a_folder_stands_for_its_files(run: Run, data: Path, queued: Queued) -> None:
    assert run("submit", data).exit_code == 0
    assert prompts(queued()) == ["data/a.jsonl", "data/b.txt"]


def test_with_recursive_a_folder_stands_for_those_below_too(run: Run, data: Path, queued: Queued) -> None:
    assert run("submit", data, "--recursive").exit_code == 0
    assert prompts(queued()) == ["data/a.jsonl", "data/b.txt", "data/below/c.csv"]


def test_a_pattern_stands_for_the_files_of_prompts_that_match_each_once(run: Run, data: Path, queued: Queued) -> None:
    assert run("submit", f"{data}/**/*", f"{data}/b.txt").exit_code == 0
    assert sorted(map(str, prompts(queued()))) == ["data/a.jsonl", "data/b.txt", "data/below/c.csv"]


def test_a_file_whose_name_looks_like_a_pattern_is_itself(run: Run, tmp_path: Path, queued: Queued) -> None:
    (tmp_path / "a[1].txt").write_text("one\n")
    assert run("submit", tmp_path / "a[1].txt").exit_code == 0
    assert prompts(queued()) == ["one"]


@pytest.mark.parametrize("word", ["data/below/x*.txt", "empty"])
def test_what_stands_for_no_file_is_wrong_usage(run: Run, data: Path, word: str, ledger: Ledger) -> None:
    (data.parent / "empty").mkdir()
    result = run("submit", data, data.parent / word)
    assert result.exit_code == 2
    assert "no .txt, .jsonl, .csv and .parquet" in result.stderr
    assert ledger.newest() == []


# Parameters of one file


def test_parameters_come_from_row_then_file_then_command_then_configuration(
    run: Run, folders: Folders, tmp_path: Path, queued: Queued
) -> None:
    folders.configs.mkdir()
    (folders.configs / "producer.yaml").write_text("params: {top_k: 1, seed: 1, max_new_tokens: 1, temperature: 0.1}\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "temperature": 0.4}\n')
    (tmp_path / "a.params.yaml").write_text("max_tokens: 3\ntemperature: 0.3\n")
    flags = ["--seed", "2", "--max-new-tokens", "2", "--temperature", "0.2"]
    assert run("submit", tmp_path / "a.jsonl", *flags).exit_code == 0
    (job,) = queued()
    params = job.params
    assert (params.top_k, params.seed, params.max_new_tokens, params.temperature) == (1, 2, 3, 0.4)


def test_a_first_line_of_parameters_beats_those_beside_the_file(run: Run, tmp_path: Path, queued: Queued) -> None:
    (tmp_path / "a.txt").write_text('# params: {"seed": 4}\none\n')
    (tmp_path / "a.params.yaml").write_text("seed: 3\ntop_k: 3\n")
    assert run("submit", tmp_path / "a.txt").exit_code == 0
    (job,) = queued()
    assert (job.prompt, job.line, job.params.seed, job.params.top_k) == ("one", 2, 4, 3)


@pytest.mark.parametrize(
    ("beside", "first", "says"),
    [
        ("temprature: 1\n", "", "a.params.yaml: unknown parameter 'temprature' (did you mean 'temperature'?)"),
        ("seed: -1\n", "", "a.params.yaml: seed: Input should be greater"),
        ("- 1\n", "", "a.params.yaml: expected parameters by name"),
        ("a: [\n", "", "a.params.yaml: not readable as YAML"),
        ("", "# params: {sed: 1}\n", "a.txt line 1: unknown parameter 'sed' (did you mean 'seed'?)"),
    ],
)
def test_wrong_parameters_of_a_file_are_told_with_their_place_and_nothing_is_submitted(
    run: Run, tmp_path: Path, ledger: Ledger, beside: str, first: str, says: str
) -> None:
    (tmp_path / "a.txt").write_text(f"{first}one\n")
    (tmp_path / "a.params.yaml").write_text(beside)
    result = run("submit", tmp_path / "a.txt")
    assert result.exit_code == 2
    assert says in result.stderr
    assert ledger.newest() == []


def test_a_watched_file_with_wrong_parameters_waits_until_they_are_right(
    folders: Folders, watch: Any, queued: Queued, notices: list[dict[str, Any]]
) -> None:
    (folders.inputs / "a.txt").write_text("one\n")
    (folders.inputs / "a.params.yaml").write_text("sed: 1\n")
    watch()
    assert any("did you mean 'seed'" in notice.get("reason", "") for notice in notices)
    assert (folders.inputs / "a.txt").exists()
    assert queued() == []
    (folders.inputs / "a.params.yaml").write_text("seed: 1\n")
    watch()
    assert [job.params.seed for job in queued()] == [1]


@pytest.fixture
def claims(producer_settings: Callable[..., ProducerSettings], ledger: Ledger) -> Claims:
    return Claims(producer_settings(), ledger)


def take(claims: Claims, file: Path) -> BatchSpec:
    spec = claims.take(file, Look.at(file))
    assert spec is not None
    return spec


def test_parameters_move_with_the_last_file_that_needs_them(claims: Claims, folders: Folders) -> None:
    for name in ("a.txt", "a.csv", "b.txt"):
        (folders.inputs / name).write_text("prompt\none\n")
    beside = folders.inputs / "a.params.yaml"
    beside.write_text("seed: 1\n")
    first = take(claims, folders.inputs / "a.txt")
    assert beside.exists()
    second = take(claims, folders.inputs / "a.csv")
    assert not beside.exists()
    for spec in (first, second):
        assert spec.params.seed == 1
        assert (folders.claimed / spec.batch / "a.params.yaml").read_text() == "seed: 1\n"
    assert take(claims, folders.inputs / "b.txt").params.seed is None


def test_parameters_that_a_crash_left_behind_are_no_other_files(
    claims: Claims, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders.inputs / "a.txt").write_text("one\n")
    beside = folders.inputs / "a.params.yaml"
    beside.write_text("seed: 1\n")

    class Crash(BaseException):
        pass

    def die(_: Path) -> bool:
        raise Crash

    with monkeypatch.context() as dying:
        dying.setattr("producer.claims._needed", die)
        with pytest.raises(Crash):
            take(claims, folders.inputs / "a.txt")
    assert beside.exists()
    (spec,) = claims.pending()
    assert spec.params.seed == 1
    assert not beside.exists()
    beside.write_text("seed: 1\n")  # the next file's
    claims.pending()
    assert beside.exists()


def test_parameters_that_are_still_written_hold_the_file_back(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("producer.inbox.time.monotonic", lambda: now[0])
    inbox = Inbox(folders.inputs, settle_s=1.0)
    (folders.inputs / "a.txt").write_text("one\n")
    inbox.look()
    now[0] += 0.9
    (folders.inputs / "a.params.yaml").write_text("seed: 1\n")
    inbox.look()
    now[0] += 0.9
    assert inbox.look() == []
    now[0] += 0.2
    assert [file.name for file, _ in inbox.look()] == ["a.txt"]
    (folders.inputs / "a.txt").unlink()
    assert inbox.look() == []
    assert not inbox.unsettled  # parameters alone are nothing to wait for


# Standard input


@pytest.fixture
def environment(folders: Folders, redis_url: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "DLLM_ROOT": str(folders.root), "DLLM_REDIS_URL": redis_url, "PYTHONPATH": root}


def piped(environment: dict[str, str], data: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    command = [*PRODUCER, "submit", "-", *words]
    return subprocess.run(command, input=data, env=environment, capture_output=True, timeout=60, check=False)


def test_standard_input_is_a_batch_like_any_file(
    environment: dict[str, str], ledger: Ledger, folders: Folders, queued: Queued
) -> None:
    done = piped(environment, b'{"prompt": "one"}\n')
    assert done.returncode == 0, done.stderr
    batch = ledger.get(done.stdout.decode().strip())
    assert batch is not None
    assert (batch.spec.source, batch.spec.output) == ("stdin.jsonl", "stdin")
    done = piped(environment, b"# params: {seed: 3}\ntwo\n", "--name", "mine", "--input-format", "txt", "--seed", "1")
    batch = ledger.get(done.stdout.decode().strip())
    assert batch is not None
    assert (folders.claimed / batch.spec.batch / "mine.txt").exists()
    assert [(job.prompt, job.params.seed) for job in queued()] == [("one", None), ("two", 3)]
    assert [file.name for file in folders.inputs.iterdir()] == [".claimed"]


def test_the_same_on_standard_input_again_goes_on_with_its_batch(
    environment: dict[str, str], ledger: Ledger, folders: Folders, queued: Queued
) -> None:
    data = b'{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n'
    first = piped(environment, data).stdout.decode().strip()
    cancelling.cancel_rows(first, ["a"], ledger, folders)
    again = piped(environment, data)
    assert again.stdout.decode().strip() == first, again.stderr
    assert f"standard input was submitted before as {first}: 0 of 2 rows are done, 1 that had" in again.stderr.decode()
    assert sorted(prompts(queued())) == ["one", "two"]
    assert [folder.name for folder in folders.claimed.iterdir()] == [first]
    assert piped(environment, data, "--force").stdout.decode().strip() != first


def test_an_unknown_format_of_standard_input_is_refused(environment: dict[str, str]) -> None:
    done = piped(environment, b"", "--input-format", "jsnl")
    assert done.returncode == 2
    assert b"did you mean 'jsonl'?" in done.stderr


def test_a_stop_while_standard_input_is_read_leaves_nothing(
    environment: dict[str, str], folders: Folders, ledger: Ledger, wait_until: Callable[..., None]
) -> None:
    process = subprocess.Popen([*PRODUCER, "submit", "-"], stdin=subprocess.PIPE, env=environment)
    try:
        assert process.stdin is not None
        process.stdin.write(b'{"prompt": "one"}\n')
        process.stdin.flush()
        wait_until(lambda: [file for file in folders.inputs.glob(".stdin-*") if file.exists()])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
    assert list(folders.inputs.glob(".stdin-*")) == []
    assert list(folders.claimed.iterdir()) == []
    assert ledger.newest() == []


# Folders below


def test_folders_below_the_inbox_are_left_alone_unless_told(folders: Folders, watch: Any, queued: Queued) -> None:
    below = folders.inputs / "below" / "deep"
    below.mkdir(parents=True)
    (below / "a.txt").write_text("one\n")
    (below / "a.params.yaml").write_text("seed: 3\n")
    watch()
    assert queued() == []
    watch(recursive=True)
    assert [(job.prompt, job.params.seed) for job in queued()] == [("one", 3)]
    assert list(below.iterdir()) == []


def test_outputs_and_sources_keep_the_folders_path(
    run: Run, folders: Folders, data: Path, ledger: Ledger, completion: Callable[..., Any]
) -> None:
    assert run("submit", data, "--recursive").exit_code == 0
    batches = {batch.spec.output: batch for batch in ledger.newest()}
    assert set(batches) == {"a", "b", "below/c"}
    batch = batches["below/c"].spec.batch
    with SegmentWriter(folders, batch, "w") as segment, ledger.redis.pipeline() as pipe:
        segment.append([completion(0)])
        ledger.mark(pipe, batch, 0, Mark.DONE)
        pipe.execute()
    assert sealing.seal(batch, ledger, folders)
    assert (folders.outputs / "below" / "c.jsonl").exists()
    assert (folders.processed / "below" / "c.csv").exists()
    assert run("results", batch).stdout.count("\n") == 1


def test_a_folder_that_is_called_like_an_output_is_no_obstacle(folders: Folders, watch: Any, ledger: Ledger) -> None:
    (folders.inputs / "a.jsonl").mkdir()
    (folders.inputs / "a.jsonl" / "x.txt").write_text("one\n")
    watch(recursive=True)
    (batch,) = ledger.newest()
    assert batch.spec.output == "a_jsonl/x"


def test_a_file_dropped_below_wakes_the_watcher(
    folders: Folders,
    producer_settings: Callable[..., ProducerSettings],
    ledger: Ledger,
    queued: Queued,
    wait_until: Callable[..., None],
) -> None:
    (folders.inputs / "below").mkdir()
    stop = threading.Event()
    watcher = Watcher(producer_settings(recursive=True, scan_s=3600.0), ledger, stop.is_set)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        wait_until(lambda: watcher._hints._alive())
        (folders.inputs / "below" / "a.txt").write_text("one\n")
        wait_until(queued)
    finally:
        stop.set()
        thread.join()
