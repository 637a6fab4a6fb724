"""What the HTTP service costs, with worker, service and client as processes of their own on this machine.

    python benchmarks/serve.py [added] [streams]

- added: milliseconds that a request through the service takes more than the bare engine, for a model that costs
  nothing. What is left is HTTP, the queue, and the way back.
- streams: 200 streams at once on a model whose steps sleep: errors, time to the first text, events a second.
"""

# ruff: noqa: E402
from __future__ import annotations

import os.path
import sys

# Run as a script, this folder comes first on the path, and `queue` beside this file would hide the standard library's.
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import asyncio
import functools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2

from benchmarks.queue import PLAN, Place, SleepingModel
from contract import logs, server
from contract.sampling import SamplingParams
from worker.engine import EngineStats, Finished, Request
from worker.intake import Intake
from worker.loop import Loop
from worker.outputs import Outputs

ROUNDS = 5
REQUESTS = 200
STREAMS = 200
STEPS, TOKENS_A_STEP, STEP_S = 20, 4, 0.05
START_S = 120.0
PROMPT = "Why is the sky blue?"


class StreamingEngine:
    """Rows of `STEPS` steps, each of which makes `TOKENS_A_STEP` tokens final and sleeps."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = self.most_rows = max_rows
        self.stats = EngineStats()
        self._steps: dict[Any, int] = {}

    def add(self, request: Request) -> None:
        self._steps[request.id] = 0

    def room(self, urgent: bool = False) -> int:
        return self.max_rows - len(self._steps)

    def in_the_way(self) -> None:
        return None

    def active(self) -> list[Any]:
        return list(self._steps)

    def remove(self, request_id: Any) -> bool:
        return self._steps.pop(request_id, None) is not None

    def progress(self, request_id: Any, known: int) -> list[int]:
        return list(range(known, self._steps[request_id] * TOKENS_A_STEP))

    def step(self) -> list[Finished]:
        if self._steps:
            time.sleep(STEP_S)
        self._steps = {row: steps + 1 for row, steps in self._steps.items()}
        ended = [row for row, steps in self._steps.items() if steps == STEPS]
        for row in ended:
            del self._steps[row]
        tokens = tuple(range(STEPS * TOKENS_A_STEP))
        return [Finished(row, 1, tokens, "stop", PLAN, STEPS, STEPS, STEPS, STEPS * STEP_S) for row in ended]


class StreamingModel(SleepingModel):
    """The same around a `StreamingEngine`; a token's text is its number."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows, 0.0)
        self.engine: Any = StreamingEngine(max_rows)
        self.tokenizer = SimpleNamespace(
            decode=_text, decode_raw=_text, settled=len, lasting=lambda text: text, end_of_answer=None
        )


def _text(token_ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in token_ids)


def _cheap() -> Any:
    return SleepingModel(32, 0.0)


def _streaming() -> Any:
    return StreamingModel(STREAMS * 2)


def _work(root: Path, make: Callable[[], Any]) -> None:
    """Be a worker until the process is ended."""
    here = Place(root)
    model = make()
    rows = model.engine.max_rows

    def vitals() -> dict[str, str | int | float]:
        return {"model": model.name, "most_rows": rows, "tokens_per_s": 0.0}

    with (
        Intake(here.redis, here.ledger, here.worker.model_copy(update={"max_rows": rows}), vitals) as intake,
        Outputs(here.worker.folders, here.ledger, intake.name) as outputs,
    ):
        Loop(intake, model, outputs, 1.0, logs.get()).run()


@contextmanager
def serving(make: Callable[[], Any]) -> Iterator[str]:
    """The address of a service with a worker of the model that `make` makes."""
    with tempfile.TemporaryDirectory(prefix="dllm-serve-") as folder:
        root = Path(folder)
        here = Place(root)
        environment = {**os.environ, "DLLM_ROOT": folder, "DLLM_LOG_LEVEL": "warning", "PYTHONPATH": sys.path[0]}
        processes: list[Any] = []
        try:
            worker = multiprocessing.get_context("spawn").Process(target=_work, args=(root, make), daemon=True)
            worker.start()
            processes.append(worker)
            port = _free_port()
            program = "from producer.cli import main; main()"
            command = [sys.executable, "-c", program, "serve", "--port", str(port)]
            processes.append(subprocess.Popen(command, env=environment))
            url = f"http://127.0.0.1:{port}"
            _until_ready(url)
            yield url
        finally:
            for process in processes:
                process.kill()
            server.stop(here.producer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx2.get(f"{url}/readyz").status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} is not ready within {START_S:g} s")


def added() -> tuple[float, float]:
    """Milliseconds at P50 of a request through the service, and of the bare engine."""
    model = _cheap()
    bare = [timed(functools.partial(_bare, model, str(number))) for number in range(REQUESTS)]
    body = {"prompt": PROMPT}
    with serving(_cheap) as url, httpx2.Client(base_url=url, timeout=60) as client:
        for _ in range(10):
            client.post("/generate", json=body).raise_for_status()
        through = [timed(lambda: client.post("/generate", json=body).raise_for_status()) for _ in range(REQUESTS)]
    return statistics.median(through) * 1e3, statistics.median(bare) * 1e3


def _bare(model: Any, name: str) -> None:
    model.engine.add(model.request(name, PROMPT, SamplingParams()))
    while not model.engine.step():
        pass


def streams() -> dict[str, float]:
    """What `STREAMS` clients see who all ask at the same moment."""
    with serving(_streaming) as url:
        return asyncio.run(_all_streams(url))


async def _all_streams(url: str) -> dict[str, float]:
    limits = httpx2.Limits(max_connections=STREAMS, max_keepalive_connections=STREAMS)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
        began = time.perf_counter()
        seen = await asyncio.gather(*(_stream(client) for _ in range(STREAMS)), return_exceptions=True)
        seconds = time.perf_counter() - began
    good = [one for one in seen if isinstance(one, tuple)]
    for error in {repr(one) for one in seen if isinstance(one, BaseException)}:
        sys.stderr.write(f"{error}\n")
    if not good:
        return {"errors": STREAMS}
    firsts = sorted(first for first, _ in good)
    return {
        "errors": STREAMS - len(good),
        "first_p50_s": firsts[len(firsts) // 2],
        "first_p95_s": firsts[len(firsts) * 95 // 100],
        "seconds": seconds,
        "least_s": STEPS * STEP_S,
        "events_per_s": sum(events for _, events in good) / seconds,
    }


async def _stream(client: httpx2.AsyncClient) -> tuple[float, int]:
    """Seconds until the first text, and how many events there were. Raises where the text is not whole."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True}
    began, first, text, events = time.perf_counter(), 0.0, "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            events += 1
            text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            first = first or (time.perf_counter() - began if text else 0.0)
    if text != _text(range(STEPS * TOKENS_A_STEP)):
        raise ValueError(f"a stream is not whole: {text[-40:]!r}")
    return first, events


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(names: list[str]) -> None:
    if not names or "added" in names:
        rounds = [added() for _ in range(ROUNDS)]
        through, bare = (statistics.median(values) for values in zip(*rounds, strict=True))
        more = statistics.median(one - other for one, other in rounds)
        line = f"added: {more:.2f} ms at P50; service {through:.2f}, bare engine {bare:.2f} (median of {ROUNDS})"
        sys.stdout.write(line + "\n")
    if not names or "streams" in names:
        for _ in range(ROUNDS):
            told = ", ".join(f"{name} {value:.3g}" for name, value in streams().items())
            sys.stdout.write(f"streams: {STREAMS} at once: {told}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
