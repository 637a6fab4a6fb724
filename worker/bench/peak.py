"""The matrix-product peak of this machine, and how much of it denoise steps reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from worker.bench.systems import Workload, engine_of, with_params
from worker.engine import Engine, EngineStats, Loaded, Request

SQUARES = (512, 1024, 2048, 4096)
ROWS = 128
"""Positions in flight at which the model's own shapes are tried: 32 rows with blocks of 4."""
REPEATS = 7
LEAST_S = 0.01
WINDOW_STEPS = 48
WINDOW_TOKENS = 128


@dataclass(frozen=True)
class Product:
    """A product (m, k) @ (k, n), and its rate in FLOP/s."""

    m: int
    k: int
    n: int
    rate: float = 0.0

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def best_product(loaded: Loaded) -> Product:
    """The fastest of square products and of the model's own shapes, in its dtype and on its device."""
    c = loaded.spec.decoder
    own = {
        (c.hidden_size, (c.heads + 2 * c.kv_heads) * c.head_dim),
        (c.heads * c.head_dim, c.hidden_size),
        (c.hidden_size, 2 * c.intermediate_size),
        (c.intermediate_size, c.hidden_size),
    }
    tried = [Product(size, size, size) for size in SQUARES] + [Product(ROWS, k, n) for k, n in sorted(own)]
    return max((_measured(one, loaded) for one in tried), key=lambda product: product.rate)


def _measured(product: Product, loaded: Loaded) -> Product:
    """Median of several timings; small products are repeated until a timing is long enough to read."""
    device, dtype = loaded.decoder.device, loaded.decoder.dtype
    x = torch.randn(product.m, product.k, device=device).to(dtype)
    w = torch.randn(product.n, product.k, device=device).to(dtype)  # as the weights lie: (out, in)
    once = _seconds(lambda: F.linear(x, w), 2, device)
    times = max(1, round(LEAST_S / once))
    seconds = statistics.median(_seconds(lambda: F.linear(x, w), times, device) for _ in range(REPEATS))
    return replace(product, rate=product.flops / seconds)


def _seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    with torch.inference_mode():
        for _ in range(times):
            work()
    _wait(device)
    return (time.perf_counter() - started) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def useful_flops(loaded: Loaded, stats: EngineStats) -> float:
    """2·P_linear·positions + 4·cells·heads·head_dim·layers + 2·d·V·predictions (a multiply and an add each)."""
    c = loaded.spec.decoder
    attention = c.hidden_size * (c.heads + 2 * c.kv_heads) * c.head_dim + c.heads * c.head_dim * c.hidden_size
    linear = c.layers * attention + c.active_mlp_weights
    return (
        2.0 * linear * stats.positions
        + 4.0 * stats.attention_cells * c.heads * c.head_dim * c.layers
        + 2.0 * c.hidden_size * c.vocab_size * stats.predictions
    )


@dataclass(frozen=True)
class Window:
    """Steps in which every row denoises or commits and none prefills."""

    stats: EngineStats
    flops: float

    @property
    def rate(self) -> float:
        """FLOP/s over everything in these steps: logits, rules and host work included."""
        return self.flops / self.stats.seconds if self.stats.seconds else 0.0


def denoise_window(workload: Workload, steps: int = WINDOW_STEPS) -> Window:
    """Run `rows` prompts of the set past their prefill, then count steps. Stop tokens are ignored: all rows stay."""
    loaded = replace(workload.loaded, spec=replace(workload.loaded.spec, stop_ids=frozenset()))
    engine = engine_of(loaded, workload.rows, workload.max_step_tokens, exact_timing=True)
    for request in _filled(workload.requests, workload.rows):
        engine.add(request)
    _pass_prefill(engine)
    before = engine.stats
    while engine.stats.steps - before.steps < steps and not engine.step():
        pass
    stats = engine.stats - before
    return Window(stats, useful_flops(loaded, stats))


def _filled(requests: Sequence[Request], rows: int) -> list[Request]:
    """`rows` requests with long answers, the set's own over and over."""
    many = [requests[number % len(requests)] for number in range(rows)]
    return [
        Request(number, long.prompt_ids, long.params)
        for number, long in enumerate(with_params(one, max_new_tokens=WINDOW_TOKENS) for one in many)
    ]


def _pass_prefill(engine: Engine) -> None:
    prefill = -1
    while engine.active() and engine.stats.prefill_positions != prefill:
        prefill = engine.stats.prefill_positions
        engine.step()
