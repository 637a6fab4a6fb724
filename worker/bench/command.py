"""What `worker bench` does with its flags: one of three measurements, a table, and the document for `--json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from contract.settings import WorkerSettings
from worker.bench.base import base_folder
from worker.bench.comparing import Say, baselines, compare
from worker.bench.conditions import conditions
from worker.bench.prompts import read_set, strided
from worker.bench.report import show
from worker.bench.systems import Workload
from worker.model import model_folder, open_model


@dataclass(frozen=True)
class Task:
    """The flags of `worker bench` that are not settings."""

    prompt_set: str = "mixed"
    prompts: int | None = None
    compare: str = ""
    rounds: int = 5
    budget_s: float = 20.0
    sweep: str | None = None
    plot: Path = Path("sweep.png")
    scale: str | None = None


def measure(config: WorkerSettings, task: Task, say: Say, console: Console) -> dict[str, Any]:
    """Run the task, print its table, return its document. Raises UsageError before anything heavy is loaded."""
    names = baselines(task.compare)
    model = open_model(config)
    requests = strided(read_set(task.prompt_set, model), task.prompts)
    base = base_folder(model_folder(config.folders, config.model))
    workload = Workload(model.loaded, tuple(requests), config.max_rows, config.max_step_tokens, task.budget_s, base)
    facts = conditions(model.name, model.loaded)
    facts |= {"prompt_set": task.prompt_set, "prompts": len(requests), "rows": config.max_rows}
    document = compare(workload, names, task.rounds, facts, say)
    show(document, console)
    return document
