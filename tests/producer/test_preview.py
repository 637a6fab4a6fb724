"""`submit --dry-run`: tells what a file would come to, submits nothing and needs no server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contract.paths import Folders
from contract.settings import ProducerSettings
from producer.preview import last_throughput, token_count
from tests.producer.conftest import PRODUCER

Dry = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dry(tmp_path: Path) -> Dry:
    """Run `submit --dry-run` in a process, with a Redis address at which nobody is."""
    root = str(Path(__file__).parents[2])
    nobody = {"DLLM_ROOT": str(tmp_path / "root"), "DLLM_REDIS_URL": "redis://127.0.0.1:1", "PYTHONPATH": root}

    def run(*words: object, **values: Any) -> subprocess.CompletedProcess[str]:
        command = [*PRODUCER, "submit", *map(str, words), "--dry-run"]
        environment = {**os.environ, **nobody}
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, **values
        )

    return run


def record(at: float, seconds: float, **values: Any) -> str:
    usual: dict[str, Any] = {"event": "batch_throughput", "model": "demo", "device": "cpu", "rows": 4, "unfinished": 0}
    usual |= {"output_tokens": 40, "seconds": seconds, "timestamp": datetime.fromtimestamp(at, UTC).isoformat()}
    return json.dumps({**usual, **values}) + "\n"


def test_a_clean_file_is_counted_and_nothing_is_made(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,max_new_tokens\none,10\nthree,20\n")
    done = dry("a.csv")
    assert done.returncode == 0, done.stderr
    assert "a.csv: 2 rows, 2 can run, 0 cannot\n" in done.stdout
    assert "characters of a prompt: 3 to 5, half up to 5, 95% up to 5, mean 4.0, 8 together\n" in done.stdout
    assert "tokens of the answers: up to 30 together\n" in done.stdout
    assert "time: unknown, no worker has logged its throughput for model 'demo' here\n" in done.stdout
    assert not (tmp_path / "root").exists()


def test_scripts_get_one_document(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt\none\nthree\n""\n')
    logs = tmp_path / "root" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-w.jsonl").write_text(record(1_000_000.0, 2.0))
    done = dry("a.csv", "--json", "--max-new-tokens", 10)
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    (file,) = told["files"]
    assert (file["file"], file["rows"], file["can_run"], file["errors"]) == ("a.csv", 3, 2, {"empty_prompt": 1})
    assert file["first_errors"][0]["line"] == 4
    assert (file["unit"], file["lengths"]) == ("characters", {"p50": 5, "p95": 5, "most": 5, "sum": 8})
    assert file["max_new_tokens"] == 20
    assert (told["estimate"]["seconds"], told["estimate"]["rows_per_s"]) == (1.0, 2.0)


def test_errors_are_counted_by_code_and_the_first_are_told_with_their_lines(dry: Dry, tmp_path: Path) -> None:
    bad = "".join(f'{{"prompt": "", "id": "{number}"}}\n' for number in range(12))
    (tmp_path / "a.jsonl").write_text('{"prompt": "good"}\nno json\n' + bad)
    done = dry("a.jsonl")
    assert done.returncode == 1
    assert "a.jsonl: 14 rows, 1 can run, 13 cannot\n" in done.stdout
    assert "  12 empty_prompt: put text into the prompt or remove the row\n" in done.stdout
    assert "  bad_json: a.jsonl line 2: not JSON" in done.stdout
    assert "  empty_prompt: a.jsonl line 11: the prompt is empty\n  … these are the first 10\n" in done.stdout


def test_standard_input_can_be_tried_too(dry: Dry) -> None:
    done = dry("-", "--input-format", "txt", input="one\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert "stdin.txt: 2 rows, 2 can run, 0 cannot\n" in done.stdout


def test_a_wrong_setting_is_told(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    done = dry("a.txt", "--template", "none.txt")
    assert done.returncode == 2
    assert "template none.txt: No such file or directory" in done.stderr


def test_time_is_judged_by_the_last_throughput_of_the_model(dry: Dry, tmp_path: Path) -> None:
    logs = tmp_path / "root" / "logs"
    logs.mkdir(parents=True)
    # Two overlapping micro-batches: 8 rows and 80 tokens in 4 seconds.
    (logs / "worker-w.jsonl").write_text(record(1000.0, 3.0) + "torn {\n" + record(1001.0, 2.0))
    (logs / "worker-other.jsonl").write_text(record(2000.0, 1.0, model="llada"))
    (tmp_path / "a.txt").write_text("one\n" * 10)
    done = dry("a.txt", "--max-new-tokens", "100")
    assert (
        "time: about 5.0s with answers like the last ones, 50.0s if every answer is as long as it may be" in done.stdout
    )
    assert "(2.00 rows/s and 20.0 tokens/s: worker w on cpu, 1970-01-01 00:16 UTC)" in done.stdout


def test_the_newest_record_of_all_workers_counts(folders: Folders) -> None:
    (folders.logs / "worker-a.jsonl").write_text(record(1000.0, 4.0))
    (folders.logs / "worker-b.jsonl").write_text(record(2000.0, 2.0) + record(3000.0, 1.0, rows=1, unfinished=1))
    found = last_throughput(folders.logs, "demo")
    assert found is not None
    assert (found.worker, round(found.rows_per_s * 1002)) == ("b", 4)
    assert last_throughput(folders.logs, "llada") is None


def test_tokens_are_counted_where_the_model_has_a_tokenizer(folders: Folders) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    assert token_count(ProducerSettings(root=folders.root, model="m")) is None
    words = {"one": 0, "two": 1, "?": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (folders.models / "m").mkdir(parents=True)
    tokenizer.save(str(folders.models / "m" / "tokenizer.json"))
    count = token_count(ProducerSettings(root=folders.root, model="m"))
    assert count is not None
    assert count(["one two", "three"]) == [2, 1]
    (folders.models / "m" / "tokenizer.json").write_text("{}")
    assert token_count(ProducerSettings(root=folders.root, model="m")) is None
