"""`worker bench`: what its report holds and how its figures are made. Never how fast anything is."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from contract.errors import UsageError
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from tests.canvas_checkpoint import diffusion_gemma
from tests.checkpoints import MASK, a2d_qwen3, llada, llama_block, modernbert, nemotron, sdar, stable_diffcoder, wedlm
from worker.bench import prompts, scale
from worker.bench.autoregressive import Autoregressive
from worker.bench.causal import Causal
from worker.bench.command import Task, measure
from worker.bench.comparing import BASELINES
from worker.bench.driving import Pass, barrier, continuous
from worker.bench.memory import peak_mb, reset_peak
from worker.bench.peak import best_product, denoise_window, useful_flops
from worker.bench.quality import agreement, full_step, mean_log_likelihood
from worker.bench.reference import Reference, Sampler, log_likelihood
from worker.bench.report import ratio, report, system
from worker.bench.sweep import Sweep, draw
from worker.bench.systems import LEAST_PROMPTS, Continuous, Workload
from worker.cli import app
from worker.engine import Engine, EngineStats, Loaded, Request, load

ROOT = Path(__file__).parents[2]
NEEDED = {
    "tokens_per_second",
    "tokens_per_forward",
    "tokens_per_position",
    "ratios",
    "matmul_peak_share",
    "positions_overhead",
    "host_share",
    "step_split",
    "forwards",
    "peak_memory_mb",
    "conditions",
}


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a real machine takes seconds to find."""
    monkeypatch.setattr("worker.bench.peak.SQUARES", (32, 64))
    monkeypatch.setattr("worker.bench.peak.LEAST_S", 1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, `tiny`, beside another that plays its base, and a prompt set."""
    models = tmp_path_factory.mktemp("models")
    _never_mask(llama_block(models / "tiny-base", seed=1))
    (models / "set.jsonl").write_text(
        "".join(
            json.dumps({"id": f"p{n}", "prompt": "why " * (1 + n % 3), "max_new_tokens": 5 + 3 * n}) + "\n"
            for n in range(6)
        )
    )
    return llama_block(models / "tiny")


def _never_mask(folder: Path) -> None:
    """Let the checkpoint never predict the mask id, as trained bases do; transformers would take it, the engine not."""
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][MASK] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Loaded:
    return load(folder, "cpu", "float32", threads=1)


@pytest.fixture
def workload(tiny: Loaded, folder: Path) -> Workload:
    requests = [
        Request(f"r{n}", tuple(range(40, 47 + n)), SamplingParams(max_new_tokens=6 + 5 * (n % 3))) for n in range(7)
    ]
    return Workload(tiny, tuple(requests), 3, 256, 60.0, folder.with_name("tiny-base"))


@pytest.fixture
def bench(folder: Path, worker_settings: Callable[..., WorkerSettings]) -> Callable[..., dict[str, Any]]:
    """Run the command's work on the tiny model; its document."""
    config = worker_settings(model=str(folder), dtype="float32", threads=1, max_rows=3)

    def run(**flags: Any) -> dict[str, Any]:
        task = Task(**{"prompt_set": str(folder.with_name("set.jsonl")), "rounds": 2, **flags})
        return measure(config, task, lambda line: None, Console(quiet=True))

    return run


def test_the_report_holds_everything_and_its_figures_fit_together(bench: Callable[..., dict[str, Any]]) -> None:
    document = bench(compare=",".join(BASELINES))
    assert document.keys() >= NEEDED
    assert json.loads(json.dumps(document)) == document
    assert set(document["ratios"]) == set(BASELINES)
    assert set(document["systems"]) == {"engine", *BASELINES} == set(document["conditions"]["systems"])
    for figures in document["systems"].values():
        speed = figures["tokens_per_second"]
        assert len(speed["rounds"]) == 2
        assert speed["min"] <= speed["median"] <= speed["max"]
    assert document["systems"]["static"]["tokens"] == document["systems"]["engine"]["tokens"] == document["tokens"]
    assert sum(document["step_split"].values()) == pytest.approx(1.0, abs=1e-3)
    assert document["host_share"] == document["step_split"]["host"]
    assert document["tokens_per_forward"] == pytest.approx(document["tokens"] / document["forwards"], abs=1e-3)
    assert document["positions_overhead"] >= 1.0
    assert document["peak_memory_mb"] > 0
    told = document["conditions"]
    assert told["dtype"] == "float32"
    assert (told["rows"], told["prompts"], told["rounds"]) == (3, 6, 2)
    assert len(told["load_average"]) == 3


def test_without_baselines_there_are_no_ratios(bench: Callable[..., dict[str, Any]]) -> None:
    document = bench(rounds=1, prompts=2)
    assert document["ratios"] == {}
    assert document["conditions"]["prompts"] == 2


def test_the_command_prints_tables_and_writes_the_json(folder: Path, tmp_path: Path) -> None:
    flags = ["--model", str(folder), "--set", str(folder.with_name("set.jsonl")), "--rounds", "1", "--rows", "3"]
    target = tmp_path / "bench.json"
    done = CliRunner().invoke(
        app, ["bench", "--root", str(tmp_path), "--threads", "1", *flags, "--compare", "static", "--json", str(target)]
    )
    assert done.exit_code == 0, done.output
    assert "static" in done.stdout
    assert "matrix-product peak" in done.stdout
    assert json.loads(target.read_text())["ratios"].keys() == {"static"}


def test_ratios_are_medians_of_quotients_within_a_round() -> None:
    mine = [Pass(1.0, 100), Pass(2.0, 100), Pass(1.0, 100)]  # 100, 50, 100 tokens/s
    theirs = [Pass(1.0, 50), Pass(4.0, 100), Pass(1.0, 10)]  # 50, 25, 10
    assert ratio(mine, theirs) == 2.0
    assert system(mine)["tokens_per_second"]["median"] == 100.0


def test_the_report_divides_the_right_sums(workload: Workload) -> None:
    done = continuous(workload.engine(), workload.requests)
    stats = EngineStats(steps=4, denoise_positions=60, commit_positions=20, prefill_positions=20, needed_positions=80)
    stats = replace(stats, prefill_s=1.0, denoise_s=2.0, commit_s=1.0, logits_s=0.5, host_s=0.5)
    window, best = denoise_window(workload, steps=4), best_product(workload.loaded)
    document = report({"engine": [replace(done, stats=stats, seconds=2.0)]}, stats, [window], [best], 7, {})
    assert document["tokens_per_second"] == pytest.approx(done.tokens / 2.0, abs=0.01)
    assert document["tokens_per_position"] == pytest.approx(done.tokens / 80, abs=1e-3)
    assert document["positions_overhead"] == 1.25
    assert document["step_split"]["denoise"] == 0.4
    assert document["host_share"] == 0.1
    assert document["step_ms"] == 1250.0
    assert document["matmul_peak_share"] == pytest.approx(window.rate / best.rate, abs=1e-3)


@pytest.mark.parametrize("count", [1, 2, 7, 32, 96, 100])
def test_spreading_keeps_every_item_once_and_beginnings_cover_the_whole(count: int) -> None:
    order = prompts.spread(range(count))
    assert sorted(order) == list(range(count))
    if count >= 32:
        assert {at * 4 // count for at in order[:8]} == {0, 1, 2, 3}


def test_a_stride_over_the_set_keeps_its_order() -> None:
    assert prompts.strided([0, 1, 2, 3, 4, 5], 3) == [0, 2, 4]
    assert prompts.strided([0, 1], 5) == prompts.strided([0, 1], None) == [0, 1]


@pytest.mark.parametrize("name", ["short", "medium", "long", "mixed"])
def test_shipped_sets_are_found_from_anywhere(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (prompts.SHIPPED / f"{name}.jsonl").is_file()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"compare": "singel"}, "did you mean 'single'"),
        ({"prompt_set": "mixd"}, "did you mean 'mixed'"),
        ({"sweep": "treshold=0.5"}, "did you mean 'threshold'"),
        ({"sweep": "threshold=high"}, "threshold=V1"),
        ({"sweep": "threshold=1.5"}, "threshold"),
        ({"scale": "3"}, "at least 6"),
        ({"scale": "many"}, "--scale 100,1000"),
        ({"sweep": "threshold=0.5", "compare": "single"}, "one of them"),
    ],
)
def test_wrong_flags_are_refused_with_what_would_be_right(
    bench: Callable[..., dict[str, Any]], flags: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        bench(**flags)


def test_a_set_that_is_none_is_refused(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"id": "a", "prompt": "no length"}\n')
    with pytest.raises(UsageError, match="not a prompt set"):
        bench(prompt_set=str(tmp_path / "set.jsonl"))


def test_a_missing_base_says_which_folder(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    lonely = llama_block(tmp_path / "lonely")
    config = WorkerSettings(root=tmp_path, model=str(lonely), dtype="float32", threads=1)
    task = Task(str(prompts.SHIPPED / "short.jsonl"), 2, "ar", 1)
    with pytest.raises(UsageError, match="lonely-base is not there"):
        measure(config, task, lambda line: None, Console(quiet=True))


def test_models_without_masks_are_not_measured(tmp_path: Path) -> None:
    config = WorkerSettings(root=tmp_path, model=str(diffusion_gemma(tmp_path / "m")), dtype="float32", threads=1)
    task = Task(str(prompts.SHIPPED / "short.jsonl"), 2)
    with pytest.raises(UsageError, match="not family 'diffusion_gemma'"):
        measure(config, task, lambda line: None, Console(quiet=True))


def test_continuous_and_barrier_give_the_same_answers(workload: Workload) -> None:
    together = continuous(workload.engine(), workload.requests)
    batched = barrier(workload.engine(), workload.requests)
    alone = continuous(workload.engine(1), workload.requests)
    answers = {name: one.token_ids for name, one in together.finished.items()}
    assert set(answers) == {request.id for request in workload.requests}
    for other in (batched, alone):
        assert {name: one.token_ids for name, one in other.finished.items()} == answers
    assert together.tokens == sum(map(len, answers.values()))
    assert together.stats is not None
    assert batched.stats is not None
    assert together.stats.steps < batched.stats.steps


@pytest.mark.parametrize(
    ("family", "block_length", "shortest"),
    [
        (llama_block, 4, 9),
        (llada, 32, 9),
        (sdar, 4, 9),
        (stable_diffcoder, 4, 10),
        (a2d_qwen3, 4, 8),
        (nemotron, 4, 9),
        (wedlm, 32, 9),
    ],
)
def test_the_plain_sampler_is_the_engine_with_one_token_a_step(
    family: Callable[..., Path], block_length: int, shortest: int, tmp_path: Path
) -> None:
    """At lengths whose last block ends with the answer, or is one token: there the plain sampler ends."""
    loaded = load(family(tmp_path / "bd3lm"), "cpu", "float32", threads=1)
    for seed in range(4):
        length = shortest + 4 * seed
        params = SamplingParams(max_new_tokens=length, block_length=block_length)
        request = Request(seed, tuple(range(60 + seed, 71 + seed)), params)
        done = continuous(Engine(loaded.spec, loaded.decoder, 1), [full_step(request)]).finished[seed]
        assert Sampler(loaded).answer(request.prompt_ids, length, block_length) == done.token_ids


def test_the_plain_sampler_has_the_models_windows(tmp_path: Path) -> None:
    loaded = load(modernbert(tmp_path / "m"), "cpu", "float32", threads=1)
    request = Request(0, tuple(range(120)), SamplingParams(max_new_tokens=12))
    done = continuous(Engine(loaded.spec, loaded.decoder, 1), [full_step(request)]).finished[0]
    assert Sampler(loaded).answer(request.prompt_ids, 12) == done.token_ids


def test_the_reference_counts_the_engines_tokens_and_its_own_time(workload: Workload) -> None:
    engine, reference = Continuous(workload), Reference(workload)
    done = engine.run()
    reference.prepare()
    assert reference.conditions()["prompts"] == len(workload.requests)
    plain = reference.run()
    assert plain.tokens == done.tokens
    assert plain.seconds > 0


def test_causal_never_denoises_and_agrees_with_transformers(workload: Workload) -> None:
    causal, plain = Causal(workload), Autoregressive(workload)
    causal.prepare()
    plain.prepare()
    done = causal.run()
    assert done.stats is not None
    assert done.stats.denoise_positions == 0
    assert {one.steps for one in done.finished.values()} == {0}
    requests = workload.requests
    theirs = [answer for first in range(0, len(requests), 3) for answer in plain.answers(requests[first : first + 3])]
    assert [list(done.finished[request.id].token_ids) for request in requests] == theirs
    assert plain.run().tokens == done.tokens == sum(map(len, theirs))


def test_a_small_budget_makes_a_small_subset(workload: Workload) -> None:
    hurried = replace(workload, budget_s=0.0)
    single = BASELINES["single"](hurried)
    single.prepare()
    assert single.conditions()["prompts"] == LEAST_PROMPTS
    batched = BASELINES["ar"](hurried)
    batched.prepare()
    assert batched.conditions()["prompts"] == hurried.rows


def test_useful_flops_are_those_of_the_formula(tiny: Loaded) -> None:
    c = tiny.spec.decoder
    weights = sum(
        math.prod(w.shape)
        for layer in tiny.decoder.layers
        for w in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
    )
    assert useful_flops(tiny, EngineStats(denoise_positions=1)) == 2 * weights
    assert useful_flops(tiny, EngineStats(attention_cells=1)) == 4 * c.heads * c.head_dim * c.layers
    assert useful_flops(tiny, EngineStats(predictions=1)) == 2 * math.prod(tiny.decoder.head.shape)


def test_the_window_is_full_and_without_prefill(workload: Workload) -> None:
    window = denoise_window(workload, steps=12)
    assert window.stats.steps == 12
    assert window.stats.rows == 12 * workload.rows
    assert window.stats.prefill_positions == 0
    assert window.stats.denoise_positions > 0
    assert window.rate > 0


def test_the_peak_names_its_size(tiny: Loaded) -> None:
    best = best_product(tiny)
    assert best.rate > 0
    assert str(best) == f"{best.m}x{best.k}x{best.n}"


def test_peak_memory_sees_what_was_held() -> None:
    reset_peak(torch.device("cpu"))
    before = peak_mb(torch.device("cpu"))
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_mb(torch.device("cpu")) >= before
    assert before > 0
    del held


def test_agreement_counts_positions(workload: Workload) -> None:
    careful = continuous(workload.engine(), map(full_step, workload.requests)).finished
    assert agreement(careful, careful) == 1.0
    one = next(iter(careful.values()))
    changed = replace(one, token_ids=(one.token_ids[0] + 1, *one.token_ids[1:], 7))
    expected = (len(one.token_ids) - 1) / (len(one.token_ids) + 1)
    assert agreement({one.id: changed}, careful) == pytest.approx(expected)


def test_log_likelihood_is_the_sum_over_the_answer(tiny: Loaded) -> None:
    prompt, answer = (65, 66, 67), (70, 71)
    sampler = Sampler(tiny)
    total = 0.0
    for at in range(len(answer)):
        before = torch.tensor([*prompt, *answer[:at]])
        causal = torch.ones(len(before), len(before), dtype=torch.bool).tril()
        with torch.inference_mode():
            total += float(sampler.logits(before, causal)[-1].log_softmax(-1)[answer[at]])
    assert log_likelihood(tiny, prompt, answer) == pytest.approx(total, abs=1e-4)
    assert log_likelihood(tiny, prompt, ()) == 0.0


def test_the_base_finds_its_own_text_likely(workload: Workload) -> None:
    causal = Causal(workload)
    causal.prepare()
    own, base = causal.run().finished, load(workload.base, "cpu", "float32")
    other = continuous(workload.engine(), workload.requests).finished
    mean = mean_log_likelihood(base, workload.requests, own)
    assert mean_log_likelihood(base, workload.requests, other) < mean < 0


def test_a_sweep_has_a_row_per_value(bench: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    target = tmp_path / "sweep.png"
    document = bench(sweep="denoise_steps=2,50", plot=target)
    assert [row["value"] for row in document["values"]] == [2, 50]
    few, many = document["values"]
    assert few["tokens_per_forward"] > many["tokens_per_forward"]
    assert many["agreement"] == 1.0
    assert few["log_likelihood"] < 0
    assert len(few["rounds"]) == 2
    if importlib.util.find_spec("matplotlib") is not None:
        assert target.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "dllm-batch[plot]" in draw({"parameter": "threshold", "values": []}, tmp_path / "sweep.png")


def test_a_sweep_without_a_base_leaves_likelihood_out(folder: Path, tmp_path: Path) -> None:
    lonely = llama_block(tmp_path / "lonely")
    config = WorkerSettings(root=tmp_path, model=str(lonely), dtype="float32", threads=1, max_rows=3)
    task = Task(str(folder.with_name("set.jsonl")), 2, rounds=1, sweep="threshold=0.5,0.9", plot=tmp_path / "sweep.png")
    document = measure(config, task, lambda line: None, Console(quiet=True))
    assert [row["log_likelihood"] for row in document["values"]] == [None, None]
    assert "lonely-base" in document["note"]


def test_sweep_values_keep_their_kind() -> None:
    sweep = Sweep.parse("denoise_steps=5,10")
    assert sweep.values == (5, 10)
    assert sweep.params(5) == {"denoise_steps": 5, "rule": "fixed_steps"}
    assert Sweep.parse("threshold=0.5").params(0.5) == {"threshold": 0.5}


def test_scale_reports_the_cost_at_each_size(bench: Callable[..., dict[str, Any]]) -> None:
    document = bench(scale="12,40")
    assert [row["queued"] for row in document["scale"]] == [12, 40]
    assert all(row["ms_per_token"] > 0 for row in document["scale"])
    assert document["spread"] >= 0
    assert document["conditions"]["new_tokens"] == scale.NEW_TOKENS


def gpu_script() -> ModuleType:
    found = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def test_the_gpu_script_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = gpu_script()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
    assert gpu.main(["lada"]) == 2


@pytest.mark.parametrize("name", ["sdar", "llada"])
def test_the_gpu_script_runs_its_cases_at_any_size(name: str) -> None:
    """The same code on a small shape: the wanted tokens per forward come out, and all lines are there."""
    gpu = gpu_script()
    case = gpu.CASES[name]()
    small = replace(
        case.spec.decoder, vocab_size=300, hidden_size=32, intermediate_size=48, layers=2, heads=4, head_dim=8
    )
    small = replace(small, kv_heads=2 if name == "sdar" else 4)
    case = replace(
        case, spec=replace(case.spec, decoder=small, mask_id=299), rows=3, prompt_tokens=16, new_tokens=64, batches=1
    )
    lines = gpu.measure(case, torch.device("cpu"), torch.float32)
    assert lines[0] == case.title
    gained = float(lines[2].split()[0])
    assert gained == pytest.approx(case.tokens_per_forward, rel=0.12)
    assert "denoise" in lines[3]
