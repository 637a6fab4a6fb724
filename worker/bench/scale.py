"""`--scale`: does a token cost more when more prompts wait?

For each size so many prompts are queued in one engine, and the cost per token is taken over the first ones to finish:
the same number for every size and fewer than are queued, so that all rows stay busy and only the queue differs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.errors import UsageError
from worker.bench.systems import Workload, engine_of
from worker.engine import Loaded, Request

PROMPT_TOKENS = 16
NEW_TOKENS = 8


def sizes(text: str, rows: int) -> tuple[int, ...]:
    """`100,1000` as numbers. Raises UsageError for what is no number, or too small to keep all rows busy."""
    try:
        wanted = tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UsageError(f"--scale {text}: write numbers of prompts, with commas: --scale 100,1000") from None
    if min(wanted) < 2 * rows:
        raise UsageError(f"--scale {min(wanted)}: at least {2 * rows} prompts are needed, twice the rows")
    return wanted


def run_scale(
    workload: Workload, wanted: Sequence[int], rounds: int, facts: Mapping[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds per token at each size, median over rounds that take turns over the sizes."""
    # Without stop tokens every answer has the same length, whatever the weights say.
    endless = replace(workload.loaded, spec=replace(workload.loaded.spec, stop_ids=frozenset()))
    sample = min(min(wanted) - workload.rows, 2 * workload.rows)
    costs: dict[int, list[float]] = {size: [] for size in wanted}
    _cost(workload, endless, min(wanted), sample)
    for number in range(1, rounds + 1):
        for size in wanted:
            costs[size].append(_cost(workload, endless, size, sample))
            say(f"round {number}  {size} queued: {1000 * costs[size][-1]:.2f} ms per token")
    medians = {size: statistics.median(values) for size, values in costs.items()}
    least = min(medians.values())
    values = [
        {"queued": size, "ms_per_token": round(1000 * median, 4), "rounds": [round(1000 * c, 4) for c in costs[size]]}
        for size, median in medians.items()
    ]
    shown = {**facts, "rounds": rounds, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "finished": sample}
    return {"scale": values, "spread": round(max(medians.values()) / least - 1, 4), "conditions": shown}


def _cost(workload: Workload, loaded: Loaded, size: int, sample: int) -> float:
    """Seconds per token until `sample` prompts have finished, queuing each prompt included."""
    engine = engine_of(loaded, workload.rows, workload.max_step_tokens)
    started = time.perf_counter()
    for number in range(size):
        engine.add(_short(workload.requests[number % len(workload.requests)], number))
    queuing = (time.perf_counter() - started) / size
    started, finished, tokens = time.perf_counter(), 0, 0
    while finished < sample:
        for one in engine.step():
            finished += 1
            tokens += len(one.token_ids)
    return (time.perf_counter() - started + queuing * finished) / tokens


def _short(request: Request, number: int) -> Request:
    params = request.params.model_copy(update={"max_new_tokens": NEW_TOKENS})
    return Request(number, request.prompt_ids[-PROMPT_TOKENS:], params)


def show_scale(document: Mapping[str, Any], console: Console) -> None:
    """Cost per token at each queue length."""
    table = Table(title=f"Cost per token; largest over smallest: +{document['spread']:.1%}")
    for column in ("queued prompts", "ms per token"):
        table.add_column(column, justify="right")
    for row in document["scale"]:
        table.add_row(str(row["queued"]), f"{row['ms_per_token']:.2f}")
    console.print(table)
