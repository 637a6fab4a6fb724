"""What a shell completes on the command line, asked as shells ask."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from redis import Redis
from typer.testing import CliRunner

from contract.jobs import ErrorCode
from contract.ledger import Ledger
from contract.paths import Folders
from producer.cli import app
from worker.cli import app as worker_app

Run = Callable[..., Result]
NOBODY = "redis://127.0.0.1:1"


def completed(command: str, words: str) -> list[str]:
    """What stands there to choose from after `words`."""
    names = {"COMP_WORDS": f"{command} {words}", "COMP_CWORD": str(len(words.split(" ")))}
    called = {"producer": app, "worker": worker_app}[command]
    variable = f"_{command.upper()}_COMPLETE"
    result = CliRunner().invoke(called, [], prog_name=command, env={**names, variable: "complete_bash"})
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.split()


@pytest.fixture
def shell(tmp_path: Path, folders: Folders) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in bash, with the installed commands on the path."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("producer", "worker"):
        program = f"import sys; sys.argv[0] = '{name}'; from {name}.cli import main; main()"
        (home / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n')
        (home / name).chmod(0o755)
    names = {"HOME": str(home), "PATH": f"{home}:{os.environ['PATH']}", "DLLM_ROOT": str(folders.root)}
    names["PYTHONPATH"] = str(Path(__file__).parents[2])

    def run(script: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "--norc", "-c", script],
            env={**os.environ, **names, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


ASK = """
{command} --show-completion > script || exit 1
. ./script
COMP_WORDS=({command} {words}) COMP_CWORD={place}
_{command}_completion {command}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_bash_completes_batches_with_the_script_that_the_command_prints(
    shell: Callable[..., subprocess.CompletedProcess[str]], run: Run, tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "own.txt").write_text("one\n")
    (tmp_path / "other.txt").write_text("two\n")
    batches = [run("submit", tmp_path / name).stdout.strip() for name in ("own.txt", "other.txt")]
    script = f"cd {tmp_path}\n" + ASK.format(command="producer", words="results o", place=2)
    done = shell(script, DLLM_REDIS_URL=redis_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == batches[::-1]


def test_where_no_server_is_nothing_is_completed_said_or_started(
    shell: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, folders: Folders
) -> None:
    words = {"COMP_WORDS": "producer results ", "COMP_CWORD": "2", "_PRODUCER_COMPLETE": "complete_bash"}
    for more in ({"DLLM_REDIS_URL": NOBODY}, {"DLLM_REDIS_URL": "nonsense"}, {}, {"DLLM_PRIORITY": "wrong"}):
        done = shell("producer", **words, **more)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", ""), more
    assert not folders.redis.exists()


@pytest.mark.parametrize(
    ("command", "words", "found"),
    [
        ("producer", "re", ["rerun", "results", "retry", "report"]),
        ("producer", "failed --code out", ["out_of_memory"]),
        ("producer", "retry --code ", list(ErrorCode)),
        ("producer", "submit --priority ", ["high", "normal", "low"]),
        ("producer", "submit --output-format c", ["csv"]),
        ("producer", "submit --input-format csv", ["csv", "csv.gz"]),
        ("producer", "submit --rule entropy", ["entropy_bound", "entropy_threshold"]),
        ("producer", "submit --model ", ["big", "small"]),
        ("worker", "generate hello --cache ", ["none", "prefix", "dual"]),
        ("worker", "run --model s", ["small"]),
        ("worker", "run --dtype b", ["bfloat16"]),
    ],
)
def test_words_of_options_are_completed(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, command: str, words: str, found: list[str]
) -> None:
    monkeypatch.setenv("DLLM_ROOT", str(folders.root))
    for name in ("small", "big"):
        (folders.models / name).mkdir(parents=True)
        (folders.models / name / "config.json").write_text("{}")
    (folders.models / "notes").mkdir()
    assert completed(command, words) == found


def test_batches_are_those_of_the_root_and_server_on_the_line(
    run: Run, ledger: Ledger, redis: Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.txt").write_text("one\n")
    batch = run("submit", tmp_path / "own.txt").stdout.strip()
    assert completed("producer", "status own") == [batch]
    assert completed("producer", "cancel x") == []
    monkeypatch.setenv("DLLM_REDIS_URL", NOBODY)
    assert completed("producer", "retry own") == []
    assert completed("producer", f"rerun --redis-url {redis_url} own") == [batch]
