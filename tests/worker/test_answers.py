"""The answer cache: the same request to the same model is answered once, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from redis import Redis

from contract import claimed
from contract.ledger import Cursor, Ledger
from contract.paths import Folders
from contract.queues import enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests.checkpoints import llama_block
from tests.conftest import batch_spec, completion_row, prompt_job
from worker import answers as module
from worker.answers import Answers, prune
from worker.fingerprint import identity
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs

GREEDY = SamplingParams(max_new_tokens=12)
Claim = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def kept(folder: Path, count: int = 1, limit_mb: int = 256, words: str = "") -> list[str]:
    """Keep `count` answers in `folder`; their keys."""
    with Answers(folder, limit_mb, b"model") as answers:
        keys = [str(answers.key([1, number], GREEDY)) for number in range(count)]
        for number, key in enumerate(keys):
            answers.keep(key, completion_row(number, output=f"answer {number}{words}"))
            while answers._waiting:  # more than fit into the queue would not be kept
                threading.Event().wait(0.001)
    return keys


def files(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*/*/*") if not file.name.startswith(".")]


# Keys


def test_a_key_is_that_of_tokens_parameters_and_model() -> None:
    def key(
        tokens: tuple[int, ...] = (1, 2), params: SamplingParams = GREEDY, model: bytes = b"m", draws: bool = False
    ) -> str | None:
        return Answers(Path(), 1, model, draws).key(tokens, params)

    assert key() == key()
    same = [GREEDY.model_copy(update={"timeout_s": 5.0}), GREEDY.model_copy(update={"seed": 3})]
    assert {key(params=params) for params in same} == {key()}
    others = [
        key(tokens=(1, 2, 3)),
        key(tokens=(2, 1)),
        key(model=b"n"),
        *(
            key(params=SamplingParams(**values))
            for values in (
                {"max_new_tokens": 13},
                {"max_new_tokens": 12, "truncate": "left"},
                {"max_new_tokens": 12, "temperature": 1.0, "seed": 1},
                {"max_new_tokens": 12, "temperature": 1.0, "seed": 2},
            )
        ),
        key(params=GREEDY.model_copy(update={"seed": 1}), draws=True),
    ]
    assert None not in others
    assert len({key(), *others}) == len(others) + 1


def test_what_is_drawn_without_a_seed_has_no_key_and_without_a_limit_nothing_has() -> None:
    assert Answers(Path(), 1).key((1,), SamplingParams(temperature=0.5)) is None
    assert Answers(Path(), 1, always_samples=True).key((1,), GREEDY) is None
    assert Answers(Path()).key((1,), GREEDY) is None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return llama_block(tmp_path / "tiny")


def test_a_model_is_its_name_its_arithmetic_and_every_byte_of_its_files(checkpoint: Path, tmp_path: Path) -> None:
    def of(folder: Path = checkpoint, **place: str) -> bytes:
        told = {"model": "tiny", "device": "cpu", "dtype": "float32", "quantize": "none", **place}
        return identity(SimpleNamespace(folder=folder, place=lambda: dict(told)), tmp_path / "notes")  # type: ignore[arg-type]

    first = of()
    assert of(device="cuda:1") == first
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved)
    (moved / "README.md").write_text("nothing that is loaded")
    assert of(moved) == first
    others = {of(model="other"), of(dtype="bfloat16"), of(quantize="int8")}
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        changed = bytearray((moved / name).read_bytes())
        changed[-1] ^= 1
        (moved / name).write_bytes(changed)
        others.add(of(moved))
    assert len(others | {first}) == 7


def test_weights_are_read_once_for_all_workers(checkpoint: Path, tmp_path: Path) -> None:
    model: Any = SimpleNamespace(folder=checkpoint, place=lambda: {"device": "cpu"})
    first = identity(model, tmp_path / "notes")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("worker.fingerprint.hashlib.file_digest", None)
        assert identity(model, tmp_path / "notes") == first
    for note in (tmp_path / "notes").iterdir():
        note.write_bytes(b"torn")
    assert identity(model, tmp_path / "notes") == first


# The store


def test_what_one_worker_kept_another_finds_two_folders_deep(tmp_path: Path) -> None:
    keys = kept(tmp_path, 3)
    assert {str(file.relative_to(tmp_path)) for file in files(tmp_path)} == {f"{k[:2]}/{k[2:4]}/{k}" for k in keys}
    with Answers(tmp_path, 256, b"model") as other:
        found = other.find(keys[1])
        assert found is not None
        assert (found.output, found.finish_reason, found.usage.completion_tokens) == ("answer 1", "stop", 2)
        assert "seed" not in found.params
        assert other.find(other.key([9], GREEDY)) is None


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "torn in its digest": lambda content: content[:9],
    "torn": lambda content: content[:-1],
    "longer": lambda content: content + b" ",
    "changed": lambda content: content.replace(b"answer 0", b"answer 1"),
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_answer_is_none_and_is_replaced(tmp_path: Path, what: str) -> None:
    (key,) = kept(tmp_path)
    (file,) = files(tmp_path)
    file.write_bytes(DAMAGE[what](file.read_bytes()))
    assert Answers(tmp_path, 256, b"model").find(key) is None
    assert not file.exists()
    kept(tmp_path)
    assert Answers(tmp_path, 256, b"model").find(key) is not None


def test_an_answer_under_the_name_of_another_is_none(tmp_path: Path) -> None:
    first, second = kept(tmp_path, 2)
    answers = Answers(tmp_path, 256, b"model")
    shutil.copyfile(answers._file(first), answers._file(second))
    assert answers.find(second) is None
    assert answers.find(first) is not None


def test_a_crash_while_one_is_written_leaves_none_and_what_it_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = kept(tmp_path)
    (file,) = files(tmp_path)
    part = file.rename(file.with_name(f".{key}.1.part"))
    assert Answers(tmp_path, 256, b"model").find(key) is None
    prune(tmp_path / key[:2], 1 << 20)
    assert part.exists()  # somebody may be writing it
    os.utime(part, (0, 0))
    prune(tmp_path / key[:2], 1 << 20)
    assert not part.exists()


def test_a_disk_that_takes_no_answers_is_spoken_of_once_and_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with structlog.testing.capture_logs() as events:
        keys = kept(tmp_path, 3)
    assert len(events) == 1
    assert "No space left" in events[0]["reason"]
    assert list(tmp_path.glob("*/*/.*")) == files(tmp_path) == []
    assert Answers(tmp_path, 256, b"model").find(keys[0]) is None


def test_the_oldest_go_when_a_folder_takes_more_than_its_share_and_those_of_use_stay(tmp_path: Path) -> None:
    keys = kept(tmp_path, 40)
    shard = tmp_path / "shard"
    (shard / "cd").mkdir(parents=True)
    moved = []
    for age, key in enumerate(keys):
        file = shard / "cd" / key
        (tmp_path / key[:2] / key[2:4] / key).rename(file)
        os.utime(file, (1_000_000 + age, 1_000_000 + age))
        moved.append(file)
    Answers(tmp_path, 256)._freshen(moved[0])
    prune(shard, 20 * module.BLOCK)
    assert [file.exists() for file in moved] == [True, *[False] * 22, *[True] * 17]


def test_all_of_it_stays_below_the_limit_though_workers_come_and_go(tmp_path: Path) -> None:
    limit_mb = 4  # four answers a folder
    for start in range(0, 1600, 400):
        with Answers(tmp_path, limit_mb, str(start).encode()) as answers:
            for number in range(400):
                answers.keep(answers.key([number], GREEDY), completion_row(number))
    assert sum(module._on_disk(file.stat().st_size) for file in files(tmp_path)) <= limit_mb << 20
    assert len(files(tmp_path)) > 500
    with Answers(tmp_path, limit_mb) as answers:  # what is larger than a folder's share is not kept at all
        answers.keep(answers.key([1], GREEDY), completion_row(0, output="x" * 20_000))
    assert Answers(tmp_path, limit_mb).find(answers.key([1], GREEDY)) is None


def test_workers_that_write_read_and_prune_the_same_folders_never_get_a_wrong_answer(tmp_path: Path) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        with Answers(tmp_path, 1, b"model") as answers:
            for number in range(600):
                which = (number * (seed + 3)) % 97
                key = answers.key([which], GREEDY)
                found = answers.find(key)
                if found is None:
                    answers.keep(key, completion_row(0, output=f"answer {which}"))
                elif found.output != f"answer {which}":
                    wrong.append(found.output)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


# At work


@pytest.fixture
def settings(folders: Folders, worker_settings: Callable[..., WorkerSettings]) -> WorkerSettings:
    llama_block(folders.models / "demo")
    return worker_settings(model="demo", dtype="float32", threads=1, max_rows=4, lease_s=10.0, answer_cache_mb=64)


@pytest.fixture
def model(settings: WorkerSettings) -> Model:
    return open_model(settings)


@pytest.fixture
def work(redis: Redis, ledger: Ledger, folders: Folders, settings: WorkerSettings, model: Model) -> Callable[..., None]:
    """Have a worker answer all there is, with the cache."""

    def until_done(model: Model = model, name: str = "w") -> None:
        own = settings.model_copy(update={"name": name})
        answers = Answers(folders.answers, own.answer_cache_mb, identity(model, folders.answers / "fingerprints"))
        with Intake(redis, ledger, own) as intake, Outputs(folders, ledger, name) as outputs, answers:
            Loop(intake, model, outputs, 5.0, structlog.get_logger(), answers=answers).run(burst=True)

    return until_done


def rows(folders: Folders, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folders.outputs / f"{name}.jsonl").read_text().splitlines()]


def test_a_batch_that_asks_the_same_again_is_answered_without_a_step_and_counted_apart(
    work: Callable[..., None], claim: Claim, ledger: Ledger, folders: Folders, model: Model
) -> None:
    claim(5, batch="b1", output="first", params=GREEDY)
    work()
    steps = model.engine.stats.steps
    claim(5, batch="b2", output="second", params=GREEDY.model_copy(update={"timeout_s": 9.0}))
    work(name="v")
    assert model.engine.stats.steps == steps
    before, after = rows(folders, "first"), rows(folders, "second")
    for field in ("id", "prompt", "output", "finish_reason", "usage", "model"):
        assert [row[field] for row in after] == [row[field] for row in before]
    assert {row["cached"] for row in before} == {False}
    for row, old in zip(after, before, strict=True):
        assert (row["cached"], row["worker"], row["timing"]["denoise_s"]) == (True, "v", 0.0)
        assert row["denoise"] == {"steps": 0, "forwards": 0, "tokens_per_forward": 0.0}
        assert {**row["params"], "seed": 0} == {**old["params"], "timeout_s": 9.0, "seed": 0}
    tokens = sum(row["usage"]["completion_tokens"] for row in before)
    records = ledger.get_many(["b1", "b2"])
    assert [(record.counts.done, record.cached, record.output_tokens) for record in records] == [
        (5, 0, tokens),
        (5, 5, 0),
    ]
    told = json.loads((folders.outputs / "second.summary.json").read_text())
    assert told["cached"] == {"rows": 5, "completion_tokens": tokens}
    assert told["tokens"] == {"prompt": 0, "completion": 0}
    assert told["denoise_s"] is None


def test_of_equal_rows_of_a_batch_those_that_come_later_have_the_answer_of_the_first(
    work: Callable[..., None], redis: Redis, ledger: Ledger, folders: Folders
) -> None:
    spec = batch_spec(params=GREEDY)
    ledger.create(spec)
    jobs = [prompt_job("b", index, prompt="the same", params=GREEDY) for index in range(9)]
    end = Cursor(offset=1, line=9, index=9)
    assert ledger.advance("b", Cursor(), end, [], enqueuing(queue(redis, "demo", "normal"), jobs), last=True)
    work()
    found = rows(folders, "b")
    assert len({row["output"] for row in found}) == 1
    assert sum(row["cached"] for row in found) == 9 - 4  # four run together, and know nothing of each other


def test_failures_are_never_kept(
    work: Callable[..., None], claim: Claim, folders: Folders, model: Model, ledger: Ledger
) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    names = ("add", "remove", "room", "stats", "in_the_way", "most_rows", "progress")
    engine: Any = SimpleNamespace(**{name: getattr(model.engine, name) for name in names})
    engine.step, engine.max_rows = fails, 4
    claim(2, batch="b1", output="first", params=GREEDY)
    work(dataclasses.replace(model, engine=engine))
    assert files(folders.answers) == []
    (record,) = ledger.get_many(["b1"])
    assert (record.counts.failed, record.cached) == (2, 0)


def test_a_worker_process_gives_the_answers_that_another_worker_left(
    work: Callable[..., None], claim: Claim, folders: Folders, redis_url: str, ledger: Ledger
) -> None:
    claim(5, batch="b1", output="first", params=GREEDY)
    work()
    claim(6, batch="b2", output="second", params=GREEDY)
    given = {"root": folders.root, "redis_url": redis_url, "model": "demo", "dtype": "float32", "threads": 1}
    given |= {"answer_cache_mb": 64, "scan_s": 0.1}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{f"DLLM_{key.upper()}": str(given[key]) for key in given}}
    subprocess.run([sys.executable, "-m", "worker", "run", "--burst"], env=environment, check=True, timeout=90)
    assert [row["cached"] for row in rows(folders, "second")] == [True] * 5 + [False]
    assert [row["output"] for row in rows(folders, "second")][:5] == [row["output"] for row in rows(folders, "first")]
    (record,) = ledger.get_many(["b2"])
    assert record.cached == 5
    assert claimed.entries(folders) == []
