"""The main run: warm-up, then rounds in which the engine and every baseline take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from contract.errors import UsageError, nearest
from worker.bench.autoregressive import Autoregressive
from worker.bench.base import ensure_base
from worker.bench.causal import Causal
from worker.bench.driving import Pass, continuous
from worker.bench.memory import peak_mb, reset_peak
from worker.bench.peak import Product, Window, best_product, denoise_window
from worker.bench.prompts import strided
from worker.bench.reference import Reference
from worker.bench.report import ENGINE, report
from worker.bench.systems import Continuous, Single, Static, System, Workload
from worker.engine import EngineStats

BASELINES: dict[str, Callable[[Workload], System]] = {
    baseline.name: baseline for baseline in (Reference, Single, Static, Autoregressive, Causal)
}
NEED_BASE = {Autoregressive.name, Causal.name}
Say = Callable[[str], None]


def baselines(names: str) -> list[str]:
    """`reference,single` as a list. Raises UsageError for a name that is none."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in BASELINES:
            raise UsageError(f"no baseline '{name}'{nearest(name, BASELINES)}; there are: {', '.join(BASELINES)}")
    return list(dict.fromkeys(chosen))


def compare(workload: Workload, names: Sequence[str], rounds: int, facts: dict[str, Any], say: Say) -> dict[str, Any]:
    """Run everything and report. `facts` are the conditions known so far."""
    engine = Continuous(workload)
    device = workload.loaded.decoder.device
    if NEED_BASE & set(names):
        ensure_base(workload.base)  # now, rather than after the first minutes
    engine.prepare()
    reset_peak(device)
    say("engine: warm-up")
    continuous(workload.engine(), strided(workload.requests, 2 * workload.rows))
    memory = peak_mb(device)  # before the baselines' weights are there
    systems: list[System] = [BASELINES[name](workload) for name in names]
    for system in systems:
        say(f"{system.name}: warm-up")
        system.prepare()
    passes: dict[str, list[Pass]] = {ENGINE: [], **{system.name: [] for system in systems}}
    windows: list[Window] = []
    peaks: list[Product] = []
    for number in range(1, rounds + 1):
        for system in (engine, *systems):
            passes[system.name].append(_pass(system, number, say))
        peaks.append(best_product(workload.loaded))
        windows.append(denoise_window(workload))
    how = {system.name: system.conditions() for system in (engine, *systems)}
    split = _split(workload, passes[ENGINE])
    return report(passes, split, windows, peaks, memory, {**facts, "rounds": rounds, "systems": how})


def _pass(system: System, number: int, say: Say) -> Pass:
    done = system.run()
    rate = f"{done.tokens_per_second:.1f} tokens/s ({done.tokens} tokens, {done.seconds:.1f} s)"
    say(f"round {number}  {system.name}: {rate}")
    return done


def _split(workload: Workload, passes: Sequence[Pass]) -> EngineStats:
    """Seconds by phase. On a GPU they need a pass of their own, which waits for the device within each step."""
    if workload.loaded.decoder.device.type == "cuda":
        timed = [continuous(workload.engine(exact_timing=True), workload.requests)]
    else:
        timed = list(passes)
    return sum((one.stats for one in timed if one.stats is not None), EngineStats())
