"""`--sweep`: one sampling parameter at several values: speed, memory and quality of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.errors import BadPrompt, UsageError, nearest
from contract.sampling import SamplingParams, parse_params
from contract.series import summary
from worker.bench.base import load_base
from worker.bench.driving import Pass, continuous
from worker.bench.memory import peak_mb, reset_peak
from worker.bench.quality import agreement, full_step, mean_log_likelihood
from worker.bench.systems import Workload, shortened
from worker.engine import Loaded, Request

NUMERIC = [name for name in SamplingParams.model_fields if name not in ("rule", "cache", "stop")]
IMPLIED_RULE = {"entropy_bound": "entropy_bound", "denoise_steps": "fixed_steps"}
"""A parameter that belongs to one rule selects it; `threshold` belongs to several and keeps the model's own."""


@dataclass(frozen=True)
class Sweep:
    """A sampling parameter and the values to try."""

    parameter: str
    values: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> Sweep:
        """`denoise_steps=5,10` as a sweep. Raises UsageError naming what is wrong."""
        name, _, listed = text.partition("=")
        if name not in NUMERIC:
            raise UsageError(f"--sweep: no numeric parameter '{name}'{nearest(name, NUMERIC)}")
        try:
            sweep = Sweep(name, tuple(_number(value) for value in listed.split(",")))
            for value in sweep.values:
                parse_params(sweep.params(value))
        except (ValueError, BadPrompt) as error:
            raise UsageError(f"--sweep {name}: {error}; write --sweep {name}=V1,V2,…") from None
        return sweep

    def params(self, value: float) -> dict[str, Any]:
        """The parameters that a value stands for."""
        rule = IMPLIED_RULE.get(self.parameter)
        return {self.parameter: value, **({"rule": rule} if rule else {})}

    def apply(self, request: Request, value: float) -> Request:
        return Request(request.id, request.prompt_ids, parse_params(self.params(value), request.params))


def _number(text: str) -> float:
    return float(text) if "." in text or "e" in text.lower() else int(text)


def run_sweep(
    workload: Workload, sweep: Sweep, rounds: int, facts: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """A row per value; rounds take turns over the values. Quality comes last: the base would count as memory."""
    continuous(workload.engine(), shortened(workload.requests[: workload.rows]))
    careful = continuous(workload.engine(), [full_step(request) for request in workload.requests])
    tries: dict[float, list[Try]] = {value: [] for value in sweep.values}
    for number in range(1, rounds + 1):
        for value in sweep.values:
            tries[value].append(_try(workload, sweep, value))
            say(f"round {number}  {sweep.parameter} {value}: {tries[value][-1].done.tokens_per_second:.1f} tokens/s")
    base, note = _base(workload)
    rows = [_row(workload, value, tries[value], careful, base) for value in sweep.values]
    shown = {**facts, "rounds": rounds, "full_step_tokens_per_second": round(careful.tokens_per_second, 2)}
    return {"parameter": sweep.parameter, "values": rows, "note": note, "conditions": shown}


@dataclass(frozen=True)
class Try:
    """One pass at one value, and the most memory it held."""

    done: Pass
    memory_mb: int


def _try(workload: Workload, sweep: Sweep, value: float) -> Try:
    device = workload.loaded.decoder.device
    reset_peak(device)
    done = continuous(workload.engine(), [sweep.apply(request, value) for request in workload.requests])
    return Try(done, peak_mb(device))


def _base(workload: Workload) -> tuple[Loaded | None, str | None]:
    try:
        return load_base(workload.base, workload.loaded), None
    except UsageError as error:
        return None, f"no log-likelihood: {error}"


def _row(workload: Workload, value: float, tries: Sequence[Try], careful: Pass, base: Loaded | None) -> dict[str, Any]:
    done = tries[-1].done
    likelihood = mean_log_likelihood(base, workload.requests, done.finished) if base else None
    speed = summary([one.done.tokens_per_second for one in tries])
    return {
        "value": value,
        "tokens_per_second": speed["median"],
        "rounds": speed["rounds"],
        "outliers": speed["outliers"],
        "tokens": done.tokens,
        "tokens_per_forward": round(done.tokens / done.forwards, 3) if done.forwards else 0.0,
        "peak_memory_mb": max(one.memory_mb for one in tries),
        "agreement": round(agreement(done.finished, careful.finished), 4),
        "log_likelihood": None if likelihood is None else round(likelihood, 4),
    }


def show_sweep(document: Mapping[str, Any], console: Console) -> None:
    """The table, and why a column is empty."""
    table = Table(title=f"Sweep of {document['parameter']}")
    columns = ("tokens/s", "TPF", "peak memory", "agreement with full steps", "mean log-likelihood")
    for column in (document["parameter"], *columns):
        table.add_column(column, justify="right")
    for row in document["values"]:
        likelihood = row["log_likelihood"]
        table.add_row(
            str(row["value"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['peak_memory_mb']} MB",
            f"{row['agreement']:.1%}",
            "–" if likelihood is None else f"{likelihood:.3f}",
        )
    console.print(table)
    if document["note"]:
        console.print(document["note"], markup=False, highlight=False, soft_wrap=True)


def draw(document: Mapping[str, Any], target: Path) -> str:
    """Draw speed, memory and quality over the values; returns a line that says where, or what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: run `pip install 'dllm-batch[plot]'` (matplotlib)"
    rows: Sequence[Mapping[str, Any]] = document["values"]
    values = [row["value"] for row in rows]
    panels = {
        "tokens_per_second": "tokens/s",
        "peak_memory_mb": "peak memory (MB)",
        "agreement": "agreement with full steps",
        "log_likelihood": "mean log-likelihood (nats per token)",
    }
    drawn = {key: title for key, title in panels.items() if all(row[key] is not None for row in rows)}
    figure = Figure(figsize=(4 * len(drawn), 3.4), layout="constrained")
    for place, (key, title) in zip(figure.subplots(1, len(drawn)), drawn.items(), strict=True):
        place.plot(values, [row[key] for row in rows], marker="o")
        place.set(xlabel=document["parameter"], title=title)
        place.grid(alpha=0.3)
    try:
        figure.savefig(target, dpi=120, format="png")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    return f"plot: {target}"
