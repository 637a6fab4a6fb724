"""What `worker bench` does with its flags: one of three measurements, a table, and the document for `--json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from contract.errors import UsageError
from contract.settings import WorkerSettings
from worker.bench.base import base_folder
from worker.bench.comparing import Say, baselines, compare
from worker.bench.conditions import conditions
from worker.bench.prompts import read_set, strided
from worker.bench.report import show
from worker.bench.scale import run_scale, show_scale, sizes
from worker.bench.sweep import Sweep, draw, run_sweep, show_sweep
from worker.bench.systems import Workload
from worker.engine import Loaded
from worker.model import model_folder, open_model

Run = Callable[[Workload, dict[str, Any]], dict[str, Any]]


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
    """Run the task, print its table, return its document. Wrong flags are refused before the model is loaded."""
    run = _chosen(config, task, say, console)
    model = open_model(config)
    if not isinstance(model.loaded, Loaded):
        raise UsageError(f"`worker bench` measures models that fill masks, not family '{model.loaded.spec.family}'")
    requests = strided(read_set(task.prompt_set, model), task.prompts)
    base = base_folder(model_folder(config.folders, config.model))
    workload = Workload(model.loaded, tuple(requests), config.max_rows, config.max_step_tokens, task.budget_s, base)
    facts = conditions(model.name, model.loaded)
    return run(workload, facts | {"prompt_set": task.prompt_set, "prompts": len(requests), "rows": config.max_rows})


def _chosen(config: WorkerSettings, task: Task, say: Say, console: Console) -> Run:
    """The measurement that the flags ask for. Raises UsageError for flags that cannot be."""
    if (task.compare and (task.sweep or task.scale)) or (task.sweep and task.scale):
        raise UsageError("--compare, --sweep and --scale are separate measurements: give one of them")
    if task.sweep:
        return partial(_sweep, Sweep.parse(task.sweep), task, say, console)
    if task.scale:
        return partial(_scale, sizes(task.scale, config.max_rows), task, say, console)
    return partial(_compare, baselines(task.compare), task, say, console)


def _compare(
    names: list[str], task: Task, say: Say, console: Console, workload: Workload, facts: dict[str, Any]
) -> dict[str, Any]:
    document = compare(workload, names, task.rounds, facts, say)
    show(document, console)
    return document


def _sweep(
    sweep: Sweep, task: Task, say: Say, console: Console, workload: Workload, facts: dict[str, Any]
) -> dict[str, Any]:
    document = run_sweep(workload, sweep, task.rounds, facts, say)
    show_sweep(document, console)
    console.print(draw(document, task.plot), markup=False, highlight=False, soft_wrap=True)
    return document


def _scale(
    wanted: tuple[int, ...], task: Task, say: Say, console: Console, workload: Workload, facts: dict[str, Any]
) -> dict[str, Any]:
    document = run_scale(workload, wanted, task.rounds, facts, say)
    show_scale(document, console)
    return document
