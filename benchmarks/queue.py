"""What the queue costs, each figure beside a baseline in the same run. Starts a server of its own and stops it.

    python benchmarks/queue.py [jobs] [system] [workers] [submit]

- jobs: prompts/s through one worker whose model costs nothing, against RQ's `SimpleWorker` with a function that does
  nothing, on the same server.
- system: output tokens/s of the demo model through queue, worker and files, against the bare engine.
- workers: prompts/s of two workers against one, on a model whose steps sleep.
- submit: rows/s from a JSONL file into Redis, against RQ's `enqueue_many`.
"""

# ruff: noqa: E402
from __future__ import annotations

import os.path
import sys

# Run as a script, this folder comes first on the path, and this file would hide the standard library's `queue`.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import json
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from redis import Redis
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from contract import logs, server
from contract.jobs import Prompt
from contract.ledger import Ledger
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims
from producer.submitter import submit
from worker.bench.driving import continuous
from worker.bench.prompts import SHIPPED, read_set
from worker.engine import EngineStats, Finished, Request
from worker.engine.request import Plan
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs

ROUNDS = 5
JOBS = 3_000
SYSTEM_ROWS = 32
WORKER_PROMPTS, WORKER_ROWS, STEP_S = 480, 8, 0.2
LONGEST_S = 120.0
SUBMIT_ROWS = 30_000
PLAN = Plan(
    attention="bidirectional",
    rule="threshold",
    number=0.9,
    bound=0.0,
    max_new_tokens=1,
    denoise_steps=1,
    block_length=1,
    cache="none",
    cache_refresh=1,
    commit="separate",
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    truncate=None,
    notes=(),
)


class SleepingEngine:
    """Ends every row with its first step, which takes `step_s` seconds and computes nothing."""

    def __init__(self, max_rows: int, step_s: float) -> None:
        self.max_rows = max_rows
        self.stats = EngineStats()
        self._step_s = step_s
        self._rows: list[Request] = []

    def add(self, request: Request) -> None:
        self._rows.append(request)

    def room(self, urgent: bool = False) -> int:
        return self.max_rows - len(self._rows)

    def in_the_way(self) -> None:
        return None

    def active(self) -> list[Any]:
        return [row.id for row in self._rows]

    def remove(self, request_id: Any) -> bool:
        kept = [row for row in self._rows if row.id != request_id]
        found = len(kept) < len(self._rows)
        self._rows = kept
        return found

    def step(self) -> list[Finished]:
        if self._rows and self._step_s:
            time.sleep(self._step_s)
        ended, self._rows = self._rows, []
        return [Finished(row.id, 1, (), "stop", PLAN, 1, 1, 1, self._step_s) for row in ended]


class SleepingModel:
    """What the loop asks of a model, around a `SleepingEngine`."""

    name = "demo"

    def __init__(self, max_rows: int, step_s: float) -> None:
        self.engine = SleepingEngine(max_rows, step_s)
        self.tokenizer = SimpleNamespace(decode=lambda token_ids: "")

    def request(self, name: str, prompt: Prompt, params: SamplingParams, urgent: bool = False) -> Request:
        return Request(name, (1,), params)

    def peak_memory_mb(self) -> int:
        return 0

    def place(self) -> dict[str, str]:
        return {"model": self.name, "device": "none", "dtype": "none"}


class Place:
    """A root with a server of its own, which holds as many rows as a benchmark wants to have queued."""

    def __init__(self, root: Path) -> None:
        self.producer = ProducerSettings(root=root, model="demo", max_queued=1_000_000, max_queued_mb=1_000)
        self.worker = WorkerSettings(root=root, model="demo", linger_ms=0)
        self.producer.folders.create()
        logs.set_up(self.producer.model_copy(update={"log_level": "error"}), "benchmark", quiet=True)
        self.redis: Redis = server.open_redis(self.producer)
        self.ledger = Ledger(self.redis)

    def submit(self, name: str, rows: list[dict[str, Any]]) -> str:
        """Write the rows to a file and submit it; returns the batch."""
        file = self.producer.root / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = Claims(self.producer, self.ledger).snapshot(file)
        assert submit(spec, self.ledger, self.producer)
        return spec.batch

    def work(self, model: Any, rows: int) -> None:
        """Be a worker until the queue is empty."""
        settings = self.worker.model_copy(update={"max_rows": rows})
        with (
            Intake(self.redis, self.ledger, settings) as intake,
            Outputs(settings.folders, self.ledger, intake.name) as outputs,
        ):
            Loop(intake, model, outputs, 1.0, logs.get()).run(burst=True)


@contextmanager
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="dllm-queue-") as folder:
        opened = Place(Path(folder))
        try:
            yield opened
        finally:
            server.stop(opened.producer)


def jobs() -> tuple[float, float]:
    """Prompts/s through our worker, jobs/s through RQ's."""
    prompts = [{"prompt": f"prompt {number}"} for number in range(JOBS)]
    with place() as here:
        here.submit("jobs.jsonl", prompts)
        ours = timed(lambda: here.work(SleepingModel(32, 0.0), 32))
        queue = Queue("baseline", connection=here.redis, serializer=JSONSerializer)
        queue.enqueue_many([Queue.prepare_data("time.time") for _ in range(JOBS)])
        worker = SimpleWorker([queue], connection=here.redis, serializer=JSONSerializer)
        theirs = timed(lambda: worker.work(burst=True, logging_level="ERROR"))
    return JOBS / ours, JOBS / theirs


def system(model: Model) -> tuple[float, float]:
    """Output tokens/s through queue, worker and files, and of the bare engine."""
    rows = [json.loads(line) for line in (SHIPPED / "short.jsonl").read_text().splitlines()]
    wanted = [{"prompt": row["prompt"], "max_new_tokens": row["max_new_tokens"]} for row in rows]
    bare = continuous(model.engine, read_set("short", model))
    with place() as here:
        here.submit("system.jsonl", wanted)
        seconds = timed(lambda: here.work(model, SYSTEM_ROWS))
        answers = (here.producer.folders.outputs / "system.jsonl").read_text().splitlines()
    tokens = sum(json.loads(line)["usage"]["completion_tokens"] for line in answers)
    return tokens / seconds, bare.tokens_per_second


def workers() -> tuple[float, float]:
    """Prompts/s of two workers, and of one."""
    return _with_workers(2), _with_workers(1)


def _with_workers(count: int) -> float:
    prompts = [{"prompt": f"prompt {number}"} for number in range(WORKER_PROMPTS)]
    spawn = multiprocessing.get_context("spawn")
    with place() as here:
        here.submit("workers.jsonl", prompts)
        ready = spawn.Barrier(count + 1)
        processes = [spawn.Process(target=_sleeper, args=(here.producer.root, ready)) for _ in range(count)]
        for process in processes:
            process.start()
        ready.wait()
        published = here.producer.folders.outputs / "workers.jsonl"
        seconds = timed(lambda: _until(published.is_file))  # not until the workers are sure that nothing more comes
        for process in processes:
            process.join()
    return WORKER_PROMPTS / seconds


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done within {LONGEST_S:g} s")
        time.sleep(0.005)


def _sleeper(root: Path, ready: Any) -> None:
    here = Place(root)
    ready.wait()
    here.work(SleepingModel(WORKER_ROWS, STEP_S), WORKER_ROWS)


def submitting() -> tuple[float, float]:
    """Rows/s into Redis by our submitter, and by RQ's own call."""
    rows = [{"id": f"row-{number}", "prompt": f"prompt number {number}"} for number in range(SUBMIT_ROWS)]
    with place() as here:
        ours = timed(lambda: here.submit("submit.jsonl", rows))
        queue = Queue("baseline", connection=here.redis, serializer=JSONSerializer)
        theirs = timed(
            lambda: [
                queue.enqueue_many([Queue.prepare_data("time.time", args=(row,)) for row in rows[at : at + 500]])
                for at in range(0, SUBMIT_ROWS, 500)
            ]
        )
    return SUBMIT_ROWS / ours, SUBMIT_ROWS / theirs


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(names: list[str]) -> None:
    logging.getLogger("rq").setLevel(logging.ERROR)
    measured: dict[str, tuple[Callable[[], tuple[float, float]], str, str]] = {
        "jobs": (jobs, "prompts/s", "RQ's SimpleWorker"),
        "workers": (workers, "prompts/s, two workers", "one worker"),
        "submit": (submitting, "rows/s", "RQ's enqueue_many"),
    }
    if not names or "system" in names:
        model = open_model(WorkerSettings(model="demo", max_rows=SYSTEM_ROWS))
        measured["system"] = (lambda: system(model), "output tokens/s", "the bare engine")
    for name, (measure, unit, baseline) in measured.items():
        if names and name not in names:
            continue
        rounds = [measure() for _ in range(ROUNDS)]
        ours, theirs = (statistics.median(values) for values in zip(*rounds, strict=True))
        ratio = statistics.median(one / other for one, other in rounds)
        line = f"{name}: {ours:,.0f} {unit}; {baseline}: {theirs:,.0f}; ratio {ratio:.2f} (median of {ROUNDS})"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
