"""The whole system on the demo model: drop the example files, run producer and worker, show what came out.

`make demo` runs it. It uses the installed commands as a user would and ends whatever it started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from contract import server
from contract.errors import DllmError
from contract.ledger import Batch, BatchState, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings, read

EXAMPLES = ["questions.txt", "plain.jsonl", "openai_batch.jsonl", "broken.jsonl"]
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
WORKER = "demo"
PATIENCE_S = 600.0
console = Console(soft_wrap=True)


def main() -> int:
    """Exit code 0 when every example row ended as it should, 1 when not."""
    settings = read(ProducerSettings, {"root": HERE.parent, "model": "demo"})
    folders = settings.folders.create()
    began = time.time()
    with ExitStack() as stack:
        if settings.redis_url is None and not server.running(settings):
            stack.callback(server.stop, settings)
        ledger = Ledger(server.open_redis(settings))
        drop(folders)
        started = [
            stack.enter_context(running(settings.root, "producer", "watch")),
            stack.enter_context(running(settings.root, "worker", "run", "--model", "demo", "--name", WORKER)),
        ]
        batches = follow(ledger, began, started, settings.folders.logs)
    for batch in batches:
        show(batch, folders)
    show_throughput(folders, began)
    where = ("batch_outputs/", "outputs"), ("batch_processed/", "sources"), ("logs/", "logs")
    console.print("\n" + "  ".join(f"{what}: [bold]{folder}[/]" for folder, what in where))
    return 0


def drop(folders: Folders) -> None:
    """Copy the examples into batch_inputs/, each appearing there in one step and never over another file."""
    for name in EXAMPLES:
        partial, target = folders.inputs / f".{name}.part", folders.inputs / name
        shutil.copyfile(HERE / name, partial)
        try:
            os.link(partial, target)
        except FileExistsError:
            raise DllmError(f"{target} is there already: take it away, or let `producer watch` take it") from None
        finally:
            partial.unlink()


@contextmanager
def running(root: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of our commands, running quietly; its log is in logs/."""
    environment = {**os.environ, "DLLM_ROOT": str(root)}
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]], env=environment, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def follow(ledger: Ledger, began: float, started: list[subprocess.Popen[bytes]], logs: Path) -> list[Batch]:
    """Draw the progress until the example batches are published; returns them."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loading the model", total=None)
        while time.time() - began < PATIENCE_S:
            batches = [batch for batch in ledger.newest() if batch.spec.created_at >= began]
            batches = [batch for batch in batches if batch.spec.source in EXAMPLES]
            ended = sum(batch.counts.ended for batch in batches)
            bar.update(task, completed=ended, total=sum(batch.counts.total or 0 for batch in batches) or None)
            if any(batch.counts.done for batch in batches):
                bar.update(task, description="denoising prompts")
            if len(batches) == len(EXAMPLES) and all(batch.state is BatchState.DONE for batch in batches):
                return batches[::-1]
            for process in started:
                if process.poll() is not None:
                    said = process.stderr.read().decode() if process.stderr else ""
                    raise DllmError(f"a process ended before its time:\n{said}")
            time.sleep(0.2)
    raise DllmError(f"not done after {PATIENCE_S:.0f} s: see {logs}")


def show(batch: Batch, folders: Folders) -> None:
    """Each prompt of a batch with its output, then the lines that failed with their codes."""
    console.rule(f"[bold]{batch.spec.source}")
    for row in rows(folders.outputs / f"{batch.spec.output}.jsonl"):
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        console.print("> " + prompt, style="cyan", markup=False, highlight=False)
        console.print(row["output"], "\n", sep="", markup=False, highlight=False)
    for row in rows(folders.outputs / f"{batch.spec.output}.errors.jsonl"):
        error = row["error"]
        console.print(f"! {error['code']}: {error['message']}\n", style="red", markup=False, highlight=False)


def show_throughput(folders: Folders, began: float) -> None:
    """What the worker's log says about the run."""
    events = rows(folders.logs / f"worker-{WORKER}.jsonl")
    records = [row for row in events if row["event"] == "batch_throughput" and ended_at(row) >= began]
    tokens, forwards = sum(row["output_tokens"] for row in records), sum(row["forwards"] for row in records)
    seconds = max(map(ended_at, records)) - min(ended_at(row) - row["seconds"] for row in records)
    place = f"{records[0]['model']} on {records[0]['device']} in {records[0]['dtype']}"
    console.rule("[bold]throughput")
    console.print(
        f"{tokens} output tokens in {seconds:.1f} s: [bold]{tokens / seconds:.1f} tokens/s[/], "
        f"{tokens / forwards:.2f} tokens per forward ({place})",
        highlight=False,
    )


def ended_at(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["timestamp"]).timestamp()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DllmError as failure:
        console.print(f"error: {failure}", style="red", markup=False)
        sys.exit(1)
