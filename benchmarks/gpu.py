"""The engine at the sizes of real models, on one CUDA GPU, with random weights: no files are needed.

    python benchmarks/gpu.py [sdar] [llada]

Random weights accept nothing by confidence, so the rule is `fixed_steps` and the tokens per forward are set, not found.
Speed does not depend on what the weights say, only on their shapes. Prints output tokens/s and the step-time split.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from contract.sampling import CacheKind, SamplingParams
from worker.bench.driving import continuous
from worker.bench.report import PHASES
from worker.engine import Engine, Request
from worker.engine.models.decoder import Decoder, shapes
from worker.engine.models.spec import DecoderConfig, ModelSpec

NO_GPU = "no CUDA device: nothing was measured; run this on a machine with an NVIDIA GPU"
ROUNDS = 3
STD = 0.02


@dataclass(frozen=True)
class Case:
    """A model shape, how it is run, and the figure to reach."""

    title: str
    spec: ModelSpec
    rows: int
    prompt_tokens: int
    new_tokens: int
    tokens_per_forward: float
    target: int  # output tokens/s on an H200
    params: dict[str, Any]
    max_step_tokens: int = 16384
    batches: int = 2  # prompts of a round, in multiples of the rows


def sdar() -> Case:
    """SDAR-4B (a Qwen3 of 4B): blocks of 4, 128 rows."""
    decoder = DecoderConfig(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        max_positions=2048,
        qk_norm=True,
    )
    spec = _spec("sdar-4b", decoder, attention="block_causal", shift=False, block_length=4, commit="fused")
    return Case("SDAR-4B shape, block 4, 128 rows", spec, 128, 256, 256, 4 / 3, 10_000, {})


def llada() -> Case:
    """LLaDA-8B: a canvas of 512 (half of it prompt), 32 rows, dual cache."""
    decoder = DecoderConfig(
        vocab_size=126_464,
        hidden_size=4096,
        intermediate_size=12_288,
        layers=32,
        heads=32,
        kv_heads=32,
        head_dim=128,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        max_positions=2048,
    )
    spec = _spec("llada-8b", decoder, attention="bidirectional", shift=False, block_length=32)
    kinds = get_args(CacheKind)
    cache = "dual" if "dual" in kinds else "prefix"
    return Case(f"LLaDA-8B shape, canvas 512, cache {cache}, 32 rows", spec, 32, 256, 256, 3.0, 2_500, {"cache": cache})


def _spec(family: str, decoder: DecoderConfig, **facts: Any) -> ModelSpec:
    """Facts that are alike for both. No stop tokens: every answer has its full length."""
    alike: dict[str, Any] = {"mask_id": decoder.vocab_size - 1, "stop_ids": frozenset(), "rule": "fixed_steps"}
    return ModelSpec(family=family, decoder=decoder, threshold=0.9, tensor_name=str, **alike, **facts)


CASES: dict[str, Callable[[], Case]] = {"sdar": sdar, "llada": llada}


def random_decoder(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Weights of the right shapes: norms at one, the rest normal."""
    table = shapes(config)

    def fetch(name: str) -> torch.Tensor:
        shape = table[name]
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(std=STD)

    return Decoder(config, fetch)


def requests(case: Case, denoise_steps: int, count: int) -> list[Request]:
    """Prompts of random tokens, no two alike, so that no prefix can be shared."""
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(case.spec.mask_id, (count, case.prompt_tokens), generator=source).tolist()
    params = SamplingParams(max_new_tokens=case.new_tokens, denoise_steps=denoise_steps, **case.params)
    return [Request(number, tuple(prompt), params) for number, prompt in enumerate(ids)]


def steps_for(case: Case, decoder: Decoder) -> int:
    """The `denoise_steps` whose tokens per forward, commits counted, come nearest to the case's; one row tells.

    How many forwards a block costs beside its denoise steps is the engine's business, so it is asked, not assumed.
    """
    blocks = -(-case.new_tokens // case.spec.block_length)

    def gained(steps: int) -> float:
        engine = Engine(case.spec, decoder, 1, case.max_step_tokens)
        done = continuous(engine, requests(case, steps, 1))
        return done.tokens / done.forwards

    most = case.new_tokens // blocks
    about = round(case.new_tokens / case.tokens_per_forward)
    tried = {blocks * each for each in range(1, most + 1)} if most <= 4 else {about}
    return min(sorted(tried), key=lambda steps: abs(gained(steps) - case.tokens_per_forward))


def measure(case: Case, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """Warm-up, rounds, one more round for the split; lines to print."""
    decoder = random_decoder(case.spec.decoder, device, dtype)
    steps = steps_for(case, decoder)
    work = requests(case, steps, case.batches * case.rows)
    engine = Engine(case.spec, decoder, case.rows, case.max_step_tokens)
    continuous(engine, work[: case.rows])
    rounds = sorted((continuous(engine, work) for _ in range(ROUNDS)), key=lambda one: one.seconds)
    middle = rounds[len(rounds) // 2]
    timed = continuous(Engine(case.spec, decoder, case.rows, case.max_step_tokens, exact_timing=True), work).stats
    assert timed is not None
    shares = ", ".join(f"{phase} {getattr(timed, f'{phase}_s') / timed.seconds:.1%}" for phase in PHASES)
    return [
        case.title,
        f"  {middle.tokens_per_second:,.0f} output tokens/s (to reach on an H200: {case.target:,}); "
        f"rounds {', '.join(f'{one.tokens_per_second:,.0f}' for one in rounds)}",
        f"  {middle.tokens / middle.forwards:.2f} tokens per forward (wanted {case.tokens_per_forward:.2f}), "
        f"denoise_steps {steps}, {1000 * timed.seconds / timed.steps:.1f} ms a step",
        f"  step time: {shares}",
    ]


def main(names: list[str]) -> int:
    """Measure the named cases, or all."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"unknown case '{unknown[0]}'; there are: {', '.join(CASES)}", file=sys.stderr)  # noqa: T201
        return 2
    if not torch.cuda.is_available():
        print(NO_GPU)  # noqa: T201
        return 0
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")  # noqa: T201
    for name in names or CASES:
        print("\n".join(measure(CASES[name](), device)), flush=True)  # noqa: T201
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
