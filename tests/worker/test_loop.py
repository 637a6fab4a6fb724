"""The loop on a real server and a tiny real model: every prompt taken ends in exactly one way, whatever happens."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis import Redis

from contract.cancelling import cancel
from contract.jobs import Message, PromptJob
from contract.ledger import BatchSpec, Counts, Cursor, Ledger
from contract.paths import Folders
from contract.queues import enqueuing, queue
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests.canvas_checkpoint import diffusion_gemma
from tests.checkpoints import llama_block
from tests.conftest import waiting_ids
from worker.engine import Engine, Finished
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs
from worker.progress import Phase, Progress
from worker.throughput import TokenRate

SHORT = SamplingParams(max_new_tokens=12, seed=1)
LONG = SamplingParams(max_new_tokens=200)


@pytest.fixture(scope="module", params=[llama_block, diffusion_gemma], ids=lambda write: write.__name__)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for each engine in turn."""
    folder: Path = request.param(tmp_path_factory.mktemp("models") / "tiny")
    return folder


@pytest.fixture
def settings(checkpoint: Path, worker_settings: Callable[..., WorkerSettings]) -> WorkerSettings:
    return worker_settings(model=str(checkpoint), dtype="float32", threads=1, max_rows=4, lease_s=10.0)


@pytest.fixture
def model(settings: WorkerSettings) -> Model:
    return open_model(settings)


@pytest.fixture
def outputs(folders: Folders, ledger: Ledger) -> Iterator[Outputs]:
    with Outputs(folders, ledger, "w") as opened:
        yield opened


@pytest.fixture
def work(redis: Redis, ledger: Ledger, settings: WorkerSettings, outputs: Outputs) -> Callable[..., None]:
    """Run a loop until no work is left."""

    def until_done(model: Model, outputs: Outputs = outputs, **options: Any) -> None:
        with Intake(redis, ledger, settings) as intake:
            Loop(intake, model, outputs, grace_s=5.0, log=structlog.get_logger(), **options).run(burst=True)

    return until_done


@pytest.fixture
def queued(redis: Redis, ledger: Ledger, folders: Folders) -> Callable[..., str]:
    """Queue prompts (texts, or whole jobs' values) as one batch for the model `tiny`; returns its id."""

    def queue_all(prompts: Sequence[str | dict[str, Any]], params: SamplingParams = SHORT, batch: str = "b") -> str:
        spec = BatchSpec(
            batch=batch,
            source=f"{batch}.jsonl",
            output=batch,
            kind="jsonl",
            model="tiny",
            priority="normal",
            params=params,
            created_at=0.0,
        )
        ledger.create(spec)
        jobs = [
            PromptJob(
                **{
                    "batch": batch,
                    "index": index,
                    "line": index + 1,
                    "id": str(index),
                    "params": params,
                    "submitted_at": 0.0,
                    **({"prompt": prompt} if isinstance(prompt, str) else prompt),
                }
            )
            for index, prompt in enumerate(prompts)
        ]
        end = Cursor(offset=1, line=len(jobs), index=len(jobs))
        assert ledger.advance(batch, Cursor(), end, [], enqueuing(queue(redis, "tiny", "normal"), jobs), last=True)
        return batch

    return queue_all


def published(folders: Folders, name: str) -> list[dict[str, Any]]:
    file = folders.outputs / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Faulty:
    """An engine whose steps fail while a certain row is in it."""

    def __init__(self, engine: Engine, culprit: str, message: str = "shapes do not match") -> None:
        self._engine = engine
        self._culprit = culprit
        self._message = message
        self.failed_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Finished]:
        if self._culprit in self._engine.active():
            self.failed_steps += 1
            raise RuntimeError(self._message)
        return self._engine.step()


class FullDisk:
    """Outputs on a disk that is full for the first few writes."""

    def __init__(self, outputs: Outputs, refusals: int) -> None:
        self._outputs = outputs
        self.refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outputs, name)

    def write(self, rows: Sequence[Any]) -> Sequence[Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._outputs.write(rows)


def test_every_prompt_ends_in_one_output_row_in_input_order(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    prompts = ["a" * (1 + 7 * number % 50) for number in range(11)]
    queued(prompts)
    work(model)
    rows = published(folders, "b.jsonl")
    assert [row["id"] for row in rows] == [str(number) for number in range(11)]
    assert [row["prompt"] for row in rows] == prompts
    assert all(row["usage"]["completion_tokens"] <= SHORT.max_new_tokens for row in rows)
    assert not (folders.outputs / "b.errors.jsonl").exists()


def test_the_tokens_of_answers_are_counted_in_the_ledger_the_summary_and_the_workers_progress(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders, ledger: Ledger
) -> None:
    queued(["one", "two", "x" * 600])
    progress = Progress()
    work(model, progress=progress)
    tokens = sum(row["usage"]["completion_tokens"] for row in published(folders, "b.jsonl"))
    batch = ledger.get("b")
    assert batch is not None
    assert batch.output_tokens == progress.tokens == tokens
    told = json.loads((folders.outputs / "b.summary.json").read_text())
    assert (told["tokens"]["completion"], told["errors"]) == (tokens, {"prompt_too_long": 1})
    assert told["tokens_per_s"] == pytest.approx(tokens / told["time"]["running_s"], rel=0.1)


def test_tokens_per_second_are_those_of_the_last_minute() -> None:
    rate = TokenRate(span_s=60.0)
    assert rate.of(0, 100.0) == 0.0
    assert rate.of(500, 110.0) == 50.0
    assert rate.of(500, 160.0) == pytest.approx(500 / 60, abs=0.01)
    assert rate.of(600, 180.0) == pytest.approx(100 / 70, abs=0.01)
    assert rate.of(600, 250.0) == 0.0


def test_a_row_is_the_same_alone_and_among_others(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    sampled = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3)
    prompts = ["one", "two and more", "three" * 9]
    queued(prompts, sampled, batch="together")
    work(model)
    for prompt in prompts:
        queued([prompt], sampled, batch=f"alone-{prompts.index(prompt)}")
        work(model)
    together = [row["output"] for row in published(folders, "together.jsonl")]
    assert together == [published(folders, f"alone-{number}.jsonl")[0]["output"] for number in range(3)]


def test_prompts_that_cannot_run_become_error_rows_and_the_rest_runs(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders, ledger: Ledger
) -> None:
    conversation = {"messages": (Message(role="user", content="hello"),)}
    queued(["fine", "x" * 600, conversation, "fine too"])
    work(model)
    assert [row["id"] for row in published(folders, "b.jsonl")] == ["0", "3"]
    errors = published(folders, "b.errors.jsonl")
    assert [(row["line"], row["error"]["code"]) for row in errors] == [(2, "prompt_too_long"), (3, "bad_row")]
    assert "context of 512" in errors[0]["error"]["message"]
    assert errors[0]["error"]["attempts"] == 1  # bad input is never retried
    batch = ledger.get("b")
    assert batch is not None
    assert batch.counts == Counts(total=4, submitted=4, done=2, failed=2)


def test_what_a_row_carried_is_in_its_output_or_error_row(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    long = "x" * 100_000
    queued([{"prompt": "one", "metadata": {"topic": [1, None]}}, {"prompt": long, "metadata": {"topic": "y"}}])
    work(model)
    assert [row["metadata"] for row in published(folders, "b.jsonl")] == [{"topic": [1, None]}]
    assert [row["metadata"] for row in published(folders, "b.errors.jsonl")] == [{"topic": "y"}]


def test_prompts_of_tokens_run_and_what_was_cut_is_told(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    ids = model.tokenizer.encode("token by token")
    queued(
        [{"prompt_token_ids": ids}, "token by token", {"prompt_token_ids": (5, 300)}, "x" * 600],
        SamplingParams(max_new_tokens=16, truncate="middle", seed=1),
    )
    work(model)
    rows = published(folders, "b.jsonl")
    assert [row["id"] for row in rows] == ["0", "1", "3"]
    assert rows[0]["prompt"] == list(ids)
    assert rows[0]["output"] == rows[1]["output"]
    assert [row["notes"] for row in rows[:2]] == [[], []]
    assert rows[2]["notes"] == [f"prompt cut from 600 to {512 - 16} tokens (truncate: middle)"]
    assert rows[2]["params"]["truncate"] == "middle"
    (error,) = published(folders, "b.errors.jsonl")
    assert error["error"]["code"] == "bad_row"
    assert "token 2 is 300, and the model's are 0 to 258" in error["error"]["message"]
    assert error["prompt"] == [5, 300]


def test_a_failing_step_costs_the_culprit_and_not_its_neighbours(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    prompts = [f"prompt {number}" for number in range(6)]
    queued(prompts, batch="healthy")
    work(model)
    queued(prompts, batch="ill")
    with structlog.testing.capture_logs() as events:
        work(replace(model, engine=Faulty(model.engine, "ill-2")))
    assert [row["id"] for row in published(folders, "ill.jsonl")] == ["0", "1", "3", "4", "5"]
    (error,) = published(folders, "ill.errors.jsonl")
    assert error["error"]["code"] == "model_error"
    assert error["error"]["attempts"] == 3
    assert "shapes do not match" in error["error"]["message"]
    healthy = [row["output"] for row in published(folders, "healthy.jsonl")]
    assert [row["output"] for row in published(folders, "ill.jsonl")] == [*healthy[:2], *healthy[3:]]
    retried = [event["index"] for event in events if event["event"] == "prompt_retried"]
    assert retried == [2, 2]


def test_poison_is_raised_with_the_rows_given_back_and_only_those_of_the_step_charged(
    model: Model,
    queued: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    settings: WorkerSettings,
    outputs: Outputs,
) -> None:
    queued([f"prompt {number}" for number in range(5)], LONG)
    parting = Faulty(model.engine, "b-3")  # a step fails: rows 2 and 3 have to wait until 0 and 1 have run
    poisoned = Faulty(parting, "b-1", "CUDA error: an illegal memory access was encountered")
    loop: Loop | None = None

    def enter() -> None:
        nonlocal loop
        with Intake(redis, ledger, settings) as intake:
            loop = Loop(intake, replace(model, engine=parting), outputs, 5.0, structlog.get_logger())
            loop.take()
            loop.step()
            loop.model = replace(model, engine=poisoned)
            loop.run()

    with pytest.raises(RuntimeError, match="illegal memory access"):
        enter()
    assert loop is not None
    assert poisoned.failed_steps == 1  # never again, with half of the rows or with fewer
    waiting = [job_id.decode() for job_id in redis.lrange(queue(redis, "tiny", "normal").key, 0, -1)]
    assert sorted(waiting) == [f"b-{index}" for index in range(4)]  # row 4 was never taken from its batch
    assert redis.hgetall(ledger.key("b", "starts")) == {b"0": b"1", b"1": b"1"}


def test_a_prompt_that_is_not_answered_in_time_leaves_and_its_neighbours_go_on(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    seeded = LONG.model_copy(update={"seed": 3})
    queued(["first", "third"], seeded, batch="without")
    work(model)
    late, patient = (
        {"prompt": prompt, "params": seeded.model_copy(update={"timeout_s": timeout_s})}
        for prompt, timeout_s in (("second", 1e-6), ("third", 600.0))
    )
    queued(["first", late, patient], seeded)
    with structlog.testing.capture_logs() as events:
        work(model)
    (error,) = published(folders, "b.errors.jsonl")
    assert (error["error"]["code"], error["error"]["attempts"]) == ("deadline_exceeded", 1)
    assert error["error"]["message"] == "not answered within timeout_s = 1e-06"
    assert not [event for event in events if event["event"] == "prompt_retried"]
    rows, without = published(folders, "b.jsonl"), published(folders, "without.jsonl")
    assert [row["output"] for row in rows] == [row["output"] for row in without]
    assert ["timeout_s" in row["params"] for row in rows] == [False, True]
    assert model.engine.active() == []


def test_a_full_disk_stops_the_taking_and_loses_nothing(
    model: Model,
    queued: Callable[..., str],
    work: Callable[..., None],
    folders: Folders,
    outputs: Outputs,
) -> None:
    queued([f"prompt {number}" for number in range(9)])
    progress, full, phases = Progress(), [], []

    class Told(FullDisk):
        def write(self, rows: Sequence[Any]) -> Sequence[Any]:
            full.append(progress.disk_full)
            return super().write(rows)

        def sealed_if_complete(self, batches: Iterable[str]) -> list[str]:
            phases.append(progress.phase)
            return self._outputs.sealed_if_complete(batches)

    work(model, outputs=Told(outputs, refusals=5), progress=progress)
    assert full[:6] == [False, *[True] * 5]
    assert not progress.disk_full
    assert set(phases) == {Phase.PUBLISHING}  # which may take longer than a step: the process does not hang
    assert [row["id"] for row in published(folders, "b.jsonl")] == [str(number) for number in range(9)]
    assert len({row["id"] for row in published(folders, "b.jsonl")}) == 9


def test_nothing_is_taken_while_the_disk_is_full(
    model: Model,
    queued: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    settings: WorkerSettings,
    outputs: Outputs,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.loop.DISK_WAIT_S", 0.0)
    queued([f"prompt {number}" for number in range(9)])
    disk = FullDisk(outputs, refusals=1_000_000)
    with Intake(redis, ledger, settings) as intake:
        loop = Loop(intake, model, disk, grace_s=5.0, log=structlog.get_logger())  # type: ignore[arg-type]
        loop.take()
        while loop.running:
            loop.step()
            loop.settle()
            loop.take()
        assert len(loop.unwritten) == len(intake.held()) == 4  # as many as run together
        assert waiting_ids(redis, "tiny") == [f"b-{index}" for index in range(4, 9)]
        assert ledger.get("b").counts.ended == 0  # type: ignore[union-attr]
        disk.refusals = 0
        loop.run(burst=True)
    assert [row["id"] for row in published(folders, "b.jsonl")] == [str(number) for number in range(9)]


def test_stopping_finishes_what_runs_and_leaves_the_rest_in_order(
    model: Model,
    queued: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    settings: WorkerSettings,
    outputs: Outputs,
    wait_until: Callable[..., None],
) -> None:
    queued([f"prompt {number}" for number in range(40)], LONG)
    with Intake(redis, ledger, settings) as intake:
        loop = Loop(intake, model, outputs, grace_s=30.0, log=structlog.get_logger())
        thread = threading.Thread(target=loop.run)
        thread.start()
        wait_until(lambda: len(loop.running) == 4)
        loop.stop()
        thread.join(timeout=30)
        assert not thread.is_alive()
        assert loop.idle()
    batch = ledger.get("b")
    assert batch is not None
    waiting = waiting_ids(redis, "tiny")
    assert batch.counts.done >= 4
    assert batch.counts.failed == 0
    assert waiting == [f"b-{index}" for index in range(batch.counts.done, 40)]


def test_a_second_stop_gives_everything_back_at_once(
    model: Model,
    queued: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    settings: WorkerSettings,
    outputs: Outputs,
    wait_until: Callable[..., None],
) -> None:
    queued([f"prompt {number}" for number in range(6)], LONG)
    with Intake(redis, ledger, settings) as intake:
        loop = Loop(intake, model, outputs, grace_s=3600.0, log=structlog.get_logger())
        loop.take()
        loop.step()
        assert len(loop.running) == 4
        loop.stop()
        loop.stop()
        loop.run()
    waiting = waiting_ids(redis, "tiny")
    assert waiting == [f"b-{index}" for index in range(6)]
    assert model.engine.active() == []
    assert not redis.exists(ledger.key("b", "starts"))  # given back as if never started


def test_cancelled_rows_are_dropped_between_two_steps_and_their_neighbours_go_on(
    model: Model,
    queued: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    settings: WorkerSettings,
    outputs: Outputs,
    folders: Folders,
    wait_until: Callable[..., None],
) -> None:
    queued(["gone 0", "gone 1", "gone 2"], LONG, batch="gone")
    queued(["stays"], batch="stays")
    with Intake(redis, ledger, settings.model_copy(update={"lease_s": 0.3})) as intake:
        loop = Loop(intake, model, outputs, grace_s=5.0, log=structlog.get_logger())
        loop.take()
        assert len(model.engine.active()) == 4
        assert cancel("gone", ledger, folders).rows == 3
        wait_until(lambda: loop.take() or model.engine.active() == ["stays-0"])
        assert list(loop.running) == ["stays-0"]
        loop.run(burst=True)
    assert [row["prompt"] for row in published(folders, "stays.jsonl")] == ["stays"]
    assert published(folders, "gone.jsonl") == []
    batch = ledger.get("gone")
    assert batch is not None
    assert batch.counts == Counts(total=3, submitted=3, done=0, failed=0, cancelled=3)


def test_throughput_is_recorded_per_micro_batch_and_prompts_stay_out_of_the_log(
    model: Model, queued: Callable[..., str], work: Callable[..., None], folders: Folders
) -> None:
    queued([f"secret {number}" for number in range(9)])
    with structlog.testing.capture_logs() as events:
        work(model)
    records = [event for event in events if event["event"] == "batch_throughput"]
    rows = published(folders, "b.jsonl")
    assert sum(record["rows"] for record in records) == 9
    assert max(record["rows"] for record in records) == 4
    assert sum(record["output_tokens"] for record in records) == sum(row["usage"]["completion_tokens"] for row in rows)
    assert sum(record["prompt_tokens"] for record in records) == sum(row["usage"]["prompt_tokens"] for row in rows)
    wanted = "seconds output_tokens_per_s forwards tokens_per_forward positions padding_share queue_wait_s"
    for name in [*wanted.split(), "peak_memory_mb", "device", "dtype", "quantize", "model"]:
        assert all(name in record for record in records), name
    assert "secret" not in repr(events)


def test_prompts_are_logged_when_asked_for(model: Model, queued: Callable[..., str], work: Callable[..., None]) -> None:
    queued(["not secret"])
    with structlog.testing.capture_logs() as events:
        work(model, log_prompts=True)
    assert [event["prompt"] for event in events if event["event"] == "prompt_answered"] == ["not secret"]
