"""Passes of all rounds -> the report: one JSON document, and tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from contract.series import summary
from worker.bench.driving import Pass
from worker.bench.peak import Product, Window
from worker.engine import EngineStats

PHASES = ("prefill", "denoise", "commit", "logits", "host")
ENGINE = "engine"


def report(
    passes: Mapping[str, Sequence[Pass]],
    split: EngineStats,
    windows: Sequence[Window],
    peaks: Sequence[Product],
    peak_memory_mb: int,
    conditions: Mapping[str, Any],
) -> dict[str, Any]:
    """The document. `passes` by system, one a round; `split` from passes timed exactly."""
    mine = passes[ENGINE]
    return {
        "tokens_per_second": summary([one.tokens_per_second for one in mine])["median"],
        "ratios": {name: ratio(mine, theirs) for name, theirs in passes.items() if name != ENGINE},
        **_counts(mine[-1]),
        **_steps(split),
        **_peak_share(windows, peaks),
        "peak_memory_mb": peak_memory_mb,
        "systems": {name: system(theirs) for name, theirs in passes.items()},
        "conditions": dict(conditions),
    }


def ratio(mine: Sequence[Pass], theirs: Sequence[Pass]) -> float:
    """Median over rounds of the quotient within a round, so that a machine that slows down slows both."""
    pairs = zip(mine, theirs, strict=True)
    return round(statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs), 2)


def system(passes: Sequence[Pass]) -> dict[str, Any]:
    """Tokens per second of one system, and what its last pass produced."""
    return {
        "tokens_per_second": summary([one.tokens_per_second for one in passes]),
        "seconds": summary([one.seconds for one in passes], 3),
        "tokens": passes[-1].tokens,
    }


def _counts(done: Pass) -> dict[str, Any]:
    """What a pass computed; the same in every round, since decoding is."""
    stats = done.stats
    assert stats is not None
    answer_positions = stats.denoise_positions + stats.commit_positions
    return {
        "tokens_per_forward": _quotient(done.tokens, done.forwards),
        "tokens_per_position": _quotient(done.tokens, answer_positions),  # TPF/q
        "tokens": done.tokens,
        "prompt_tokens": sum(one.prompt_tokens for one in done.finished.values()),
        "forwards": done.forwards,
        "steps": stats.steps,
        "rows_per_step": _quotient(stats.rows, stats.steps),
        "positions": stats.positions,
        "positions_overhead": _quotient(stats.positions, stats.needed_positions),
        "attention_overhead": _quotient(stats.attention_padded, stats.attention_cells),
    }


def _steps(split: EngineStats) -> dict[str, Any]:
    shares = {phase: _quotient(getattr(split, f"{phase}_s"), split.seconds, 4) for phase in PHASES}
    return {
        "step_split": shares,
        "step_ms": _quotient(1000 * split.seconds, split.steps, 2),
        "host_share": shares["host"],
    }


def _peak_share(windows: Sequence[Window], peaks: Sequence[Product]) -> dict[str, Any]:
    """The median window against the best peak of any round, so that a disturbed peak flatters nobody."""
    best = max(peaks, key=lambda product: product.rate)
    rate = statistics.median(window.rate for window in windows)
    whole = sum((window.stats for window in windows), EngineStats())
    return {
        "matmul_peak_share": _quotient(rate, best.rate),
        "matmul_peak": {
            "gflops": round(best.rate / 1e9, 1),
            "size": str(best),
            "rounds": [round(one.rate / 1e9, 1) for one in peaks],
        },
        "denoise_window": {
            "gflops": round(rate / 1e9, 1),
            "rounds": [round(one.rate / 1e9, 1) for one in windows],
            "steps": whole.steps,
            "rows_per_step": _quotient(whole.rows, whole.steps, 1),
            "step_split": _steps(whole)["step_split"],
        },
    }


def _quotient(a: float, b: float, digits: int = 3) -> float:
    return round(a / b, digits) if b else 0.0


def show(document: Mapping[str, Any], console: Console) -> None:
    """Three tables: systems, figures of the engine, conditions."""
    console.print(_systems_table(document))
    console.print(_figures_table(document))
    console.print(_conditions_table(document["conditions"]))


def _systems_table(document: Mapping[str, Any]) -> Table:
    table = Table(title="Output tokens per second, median of rounds")
    for column in ("system", "tokens/s", "min – max", "engine is faster by", "prompts", "outlier rounds"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, row in document["systems"].items():
        speed = row["tokens_per_second"]
        factor = document["ratios"].get(name)
        table.add_row(
            name,
            f"{speed['median']:.1f}",
            f"{speed['min']:.1f} – {speed['max']:.1f}",
            "" if factor is None else f"{factor:.2f} ×",
            str(document["conditions"]["systems"][name].get("prompts", "")),
            ", ".join(str(at + 1) for at in speed["outliers"]),
        )
    return table


def _figures_table(document: Mapping[str, Any]) -> Table:
    peak, window = document["matmul_peak"], document["denoise_window"]
    split = "  ".join(f"{phase} {share:.1%}" for phase, share in document["step_split"].items())
    rows = {
        "tokens per forward (TPF)": f"{document['tokens_per_forward']:.3f}",
        "tokens per answer position (TPF/q)": f"{document['tokens_per_position']:.3f}",
        "forwards / steps": f"{document['forwards']} / {document['steps']} ({document['step_ms']:.1f} ms a step)",
        "positions computed / needed": f"{document['positions_overhead']:.3f}",
        "step time": split,
        "peak memory": f"{document['peak_memory_mb']} MB",
        "share of matrix-product peak": f"{document['matmul_peak_share']:.1%} of {peak['gflops']:.0f} GFLOP/s "
        f"({peak['size']}), {window['rows_per_step']:.0f} rows denoising",
    }
    table = Table(title="The engine", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _conditions_table(conditions: Mapping[str, Any]) -> Table:
    table = Table(title="Conditions", show_header=False)
    for name, value in conditions.items():
        if name == "systems":
            for system_name, how in value.items():
                table.add_row(system_name, ", ".join(f"{key} {what}" for key, what in how.items()))
        else:
            table.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    return table
