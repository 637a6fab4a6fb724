"""The engine of random canvases: rows see nothing of each other, memory is planned, what means nothing is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.errors import BadPrompt
from contract.sampling import SamplingParams
from tests.canvas_checkpoint import CANVAS, WINDOW, diffusion_gemma
from tests.engine.running import drain, prompt
from worker.engine import Finished, Request, engine_of, load
from worker.engine.canvas.engine import CanvasEngine
from worker.engine.canvas.loading import CanvasLoaded
from worker.engine.canvas.model import CanvasModel

POOL = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_gemma(tmp_path_factory.mktemp("gemma"), tokenizer=False)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> CanvasLoaded:
    return opened(folder, "float32")


def opened(folder: Path, dtype: str) -> CanvasLoaded:
    model = load(folder, "cpu", dtype)
    assert isinstance(model, CanvasLoaded)
    return model


def fresh(loaded: CanvasLoaded, **limits: Any) -> CanvasEngine:
    return CanvasEngine(loaded.spec, loaded.decoder, **limits)


def requests(count: int = POOL, **params: Any) -> list[Request]:
    """Prompts of 2 … 85 tokens, answers of one to four canvases."""
    return [
        Request(n, prompt(n, 2 + 83 * n // POOL), SamplingParams(**{"max_new_tokens": 9 + 5 * n, "seed": n, **params}))
        for n in range(count)
    ]


def finished_by(engine: CanvasEngine, some: list[Request]) -> dict[Hashable, Finished]:
    for one in some:
        engine.add(one)
    return drain(engine)


def tokens(finished: dict[Hashable, Finished]) -> dict[Hashable, tuple[int, ...]]:
    return {name: one.token_ids for name, one in finished.items()}


@pytest.fixture(scope="module")
def alone(loaded: CanvasLoaded) -> dict[Hashable, Finished]:
    """Every request of the pool in an engine of its own."""
    return {one.id: finished_by(fresh(loaded), [one])[one.id] for one in requests()}


def test_the_factory_gives_canvases_their_engine(loaded: CanvasLoaded) -> None:
    engine = engine_of(loaded, max_rows=5, max_step_tokens=3 * CANVAS + 1)
    assert isinstance(engine, CanvasEngine)
    assert engine.max_rows == engine.room() == 3
    assert engine_of(loaded, max_step_tokens=1).max_rows == 1
    assert engine.step() == []
    assert engine.stats.steps == 0


# A row's answer is its own


@pytest.mark.parametrize("max_rows", [2, 5, POOL])
@pytest.mark.parametrize("max_step_tokens", [CANVAS, 5 * CANVAS + 3, 2048])
def test_tokens_are_the_same_alone_and_in_any_mix(
    loaded: CanvasLoaded, alone: dict[Hashable, Finished], max_rows: int, max_step_tokens: int
) -> None:
    engine = fresh(loaded, max_rows=max_rows, max_step_tokens=max_step_tokens)
    mixed = finished_by(engine, random.Random(max_rows).sample(requests(), POOL))
    assert tokens(mixed) == tokens(alone)
    for name, one in mixed.items():
        assert replace(one, seconds=0.0) == replace(alone[name], seconds=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_rows_enter_and_leave_at_any_step(loaded: CanvasLoaded, alone: dict[Hashable, Finished], seed: int) -> None:
    """Late rows, and rows taken out in the middle of a canvas, change nothing for the others."""
    source = random.Random(seed)
    arrivals = {one.id: source.randrange(30) for one in requests()}
    removals = {name: arrivals[name] + source.randrange(1, 20) for name in source.sample(range(POOL), 4)}
    engine = fresh(loaded, max_rows=6)
    finished: dict[Hashable, Finished] = {}
    removed: set[Hashable] = set()
    step = 0
    while step < 30 or engine.active():
        for one in requests():
            if arrivals[one.id] == step:
                engine.add(one)
        removed |= {name for name, at in removals.items() if at == step and engine.remove(name)}
        finished |= {one.id: one for one in engine.step()}
        step += 1
    assert finished.keys() | removed == set(range(POOL))
    assert not finished.keys() & removed
    assert removed
    assert tokens(finished) == {name: alone[name].token_ids for name in finished}


def test_a_removed_prompt_can_come_again(loaded: CanvasLoaded, alone: dict[Hashable, Finished]) -> None:
    one = requests()[-1]
    engine = fresh(loaded)
    assert not engine.remove(one.id)
    engine.add(one)
    engine.step()
    assert engine.active() == [one.id]
    assert engine.remove(one.id)
    assert engine.active() == []
    assert finished_by(engine, [one])[one.id].token_ids == alone[one.id].token_ids


def test_a_seed_gives_its_text_again_and_others_another(loaded: CanvasLoaded) -> None:
    answers = [finished_by(fresh(loaded), requests(1, max_new_tokens=40, seed=seed))[0] for seed in (1, 1, 2)]
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids


def test_no_more_rows_run_than_the_ceiling_and_room_says_so(loaded: CanvasLoaded) -> None:
    engine = fresh(loaded, max_rows=3)
    for number, one in enumerate(requests(5)):
        engine.add(one)
        assert engine.room() == max(0, 2 - number)
    while engine.active():
        before = engine.stats.rows
        engine.step()
        assert engine.stats.rows - before <= 3
    assert engine.room() == 3


def test_a_long_prompt_does_not_hold_up_those_that_run(loaded: CanvasLoaded) -> None:
    """It is stored with what the others leave of the budget."""
    engine = fresh(loaded, max_step_tokens=2 * CANVAS)
    engine.add(Request("long", prompt(99, 300), SamplingParams(max_new_tokens=8)))
    engine.add(Request("short", prompt(1, 9), SamplingParams(max_new_tokens=8)))
    ended = [one.id for _ in range(13) for one in engine.step()]
    assert ended == ["short"]
    assert [one.id for one in drain(engine).values()] == ["long"]


def test_totals_add_up(loaded: CanvasLoaded) -> None:
    engine = fresh(loaded, max_rows=5)
    finished = finished_by(engine, requests())
    stats = engine.stats
    assert stats.positions == sum(one.positions for one in finished.values())
    assert stats.prefill_positions == sum(one.prompt_tokens for one in finished.values())
    assert stats.denoise_positions == stats.predictions == CANVAS * sum(one.steps for one in finished.values())
    assert stats.commit_positions == CANVAS * sum(one.forwards - one.steps for one in finished.values())
    assert stats.needed_positions < stats.positions
    assert stats.steps <= stats.rows
    assert stats.positions < stats.attention_cells <= stats.attention_padded
    assert stats.seconds > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_run(folder: Path, dtype: str) -> None:
    finished = finished_by(fresh(opened(folder, dtype)), requests(3))
    assert all(one.error is None for one in finished.values())


# Parameters


@pytest.mark.parametrize(
    "params",
    [
        {"rule": "threshold"},
        {"rule": "fixed_steps"},
        {"threshold": 0.9},
        {"factor": 1.0},
        {"kl_threshold": 0.1},
        {"edit_threshold": 0.9},
        {"block_length": 8},
        {"cache": "prefix"},
        {"commit": "fused"},
        {"top_p": 0.9},
        {"top_k": 5},
    ],
    ids=str,
)
def test_parameters_that_mean_nothing_here_are_refused_by_name(loaded: CanvasLoaded, params: dict[str, Any]) -> None:
    engine = fresh(loaded)
    with pytest.raises(BadPrompt, match=f"^{next(iter(params))}") as refused:
        engine.add(requests(1, **params)[0])
    assert refused.value.code == "bad_params"
    assert engine.active() == []


def test_those_that_mean_something_are_in_the_plan(loaded: CanvasLoaded) -> None:
    params = {"rule": "entropy_bound", "entropy_bound": 0.5, "temperature": 0.7, "max_new_tokens": 1000}
    plan = finished_by(fresh(loaded), [Request(0, prompt(0, 100), SamplingParams(**params))])[0].plan
    assert (plan.attention, plan.rule, plan.number, plan.temperature) == ("canvas", "entropy_bound", 0.5, 0.7)
    assert plan.denoise_steps == loaded.spec.denoise_steps
    assert plan.max_new_tokens == (512 - 100) // CANVAS * CANVAS  # whole canvases that the context leaves
    assert plan.notes == ("max_new_tokens cut from 1000 to 400: the context has 512 positions",)


def test_fewer_steps_are_fewer(loaded: CanvasLoaded) -> None:
    finished = finished_by(fresh(loaded), requests(4, denoise_steps=2, max_new_tokens=2 * CANVAS))
    assert all(one.steps in (2, 4) for one in finished.values())


@pytest.mark.parametrize(
    ("length", "code", "said"),
    [(0, "empty_prompt", "no tokens"), (497, "prompt_too_long", "longest prompt: 496 tokens")],
)
def test_prompts_that_cannot_be_answered_are_refused(loaded: CanvasLoaded, length: int, code: str, said: str) -> None:
    with pytest.raises(BadPrompt, match=said) as refused:
        fresh(loaded).add(Request(0, prompt(0, length), SamplingParams()))
    assert refused.value.code == code


def test_a_prompt_that_may_be_cut_is(loaded: CanvasLoaded) -> None:
    """To leave room for whole canvases, and its answer is that of what is left; what was done is said."""
    params = SamplingParams(truncate="left", max_new_tokens=CANVAS + 1)
    one = finished_by(fresh(loaded), [Request(0, prompt(0, 600), params)])[0]
    left = Request(0, prompt(0, 600)[-(512 - 2 * CANVAS) :], SamplingParams(max_new_tokens=CANVAS + 1))
    assert one.token_ids == finished_by(fresh(loaded), [left])[0].token_ids
    assert one.plan.notes == ("prompt cut from 600 to 480 tokens (truncate: left)",)


def test_the_longest_prompt_is_answered(loaded: CanvasLoaded) -> None:
    assert finished_by(fresh(loaded), [Request(0, prompt(0, 496), SamplingParams())])[0].error is None


# Memory and what goes wrong


def test_sliding_layers_hold_no_more_than_their_window(loaded: CanvasLoaded) -> None:
    """float32: full layers take 2 · 1 · 16 numbers a position, sliding ones 2 · 2 · 8; there are two of each."""
    memory = fresh(loaded).memory
    assert memory.need(10) == 10 * (2 * 32 + 2 * 32) * 4
    assert memory.need(100) == (100 * 2 * 32 + (WINDOW - 1) * 2 * 32) * 4
    for longest in (5, WINDOW - 1, WINDOW, 300):
        assert fresh(loaded, memory_budget=memory.need(longest)).memory.longest() == longest
        assert fresh(loaded, memory_budget=memory.need(longest + 1) - 1).memory.longest() == longest


def test_rows_wait_until_there_is_memory_for_all_they_may_hold(
    loaded: CanvasLoaded, alone: dict[Hashable, Finished]
) -> None:
    engine = fresh(loaded, memory_budget=2 * fresh(loaded).memory.need(85 + 4 * CANVAS))
    for one in requests():
        engine.add(one)
    most = 0
    finished: dict[Hashable, Finished] = {}
    while engine.active():
        finished |= {one.id: one for one in engine.step()}
        tensors = [one for row in engine.places.running for pair in row.context.held.values() for one in pair]
        assert sum(one.untyped_storage().nbytes() for one in tensors) <= engine.memory.budget
        most = max(most, len(engine.places.running))
    assert 1 < most < POOL
    assert tokens(finished) == tokens(alone)


def test_a_prompt_that_can_never_fit_is_refused(loaded: CanvasLoaded) -> None:
    engine = fresh(loaded, memory_budget=fresh(loaded).memory.need(100))
    assert engine.memory.rows(100) == 1
    with pytest.raises(BadPrompt, match="may take 132 positions, memory holds 100") as refused:
        engine.add(Request(0, prompt(0, 100), SamplingParams(max_new_tokens=20)))
    assert refused.value.code == "out_of_memory"
    assert finished_by(engine, [Request(0, prompt(0, 60), SamplingParams(max_new_tokens=20))])[0].error is None


class SmallDevice(CanvasModel):
    """A model on a device that has no memory for more than `most` positions in one forward."""

    def __init__(self, model: CanvasModel, most: int) -> None:
        self.__dict__.update(model.__dict__)
        self.most = most

    def _through(self, layers: Any, x: Tensor, stretches: Any) -> Tensor:
        if x.shape[1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._through(layers, x, stretches)


def test_fewer_rows_run_after_memory_ran_out_and_all_end_as_they_would_have(
    loaded: CanvasLoaded, alone: dict[Hashable, Finished]
) -> None:
    engine = CanvasEngine(loaded.spec, SmallDevice(loaded.decoder, 5 * CANVAS))
    assert tokens(finished_by(engine, requests())) == tokens(alone)
    assert engine.max_rows <= 5


def test_a_long_prompt_alone_is_stored_in_shorter_forwards(loaded: CanvasLoaded) -> None:
    engine = CanvasEngine(loaded.spec, SmallDevice(loaded.decoder, 40), max_step_tokens=256)
    long = Request(0, prompt(0, 200), SamplingParams(max_new_tokens=8))
    assert tokens(finished_by(engine, [long])) == tokens(finished_by(fresh(loaded), [long]))
    assert engine.max_step_tokens == 32


def test_a_row_that_does_not_fit_alone_fails_and_the_engine_goes_on(loaded: CanvasLoaded) -> None:
    engine = CanvasEngine(loaded.spec, SmallDevice(loaded.decoder, CANVAS - 1))
    for _ in range(2):
        error = finished_by(engine, requests(1))[0].error
        assert error is not None
        assert error.code == "out_of_memory"
    assert engine.active() == []


def test_other_errors_are_not_taken_for_it(loaded: CanvasLoaded) -> None:
    class Broken(SmallDevice):
        def _through(self, *_: Any) -> Tensor:
            raise RuntimeError("shapes do not match")

    engine = CanvasEngine(loaded.spec, Broken(loaded.decoder, 0))
    engine.add(requests(1)[0])
    with pytest.raises(RuntimeError, match="shapes"):
        engine.step()


def test_a_row_that_becomes_nan_fails_alone(loaded: CanvasLoaded, alone: dict[Hashable, Finished]) -> None:
    class Sick(CanvasModel):
        """Reading a prompt that begins with token 255 gives NaN."""

        def store(self, tokens: Tensor, stretches: Any) -> None:
            super().store(tokens, stretches)
            first = 0
            for stretch in stretches:
                if stretch.start == 0 and tokens[first] == 255:
                    keys, values = stretch.context.held[0]
                    stretch.context.held[0] = keys, torch.full_like(values, torch.nan)
                first += stretch.length

    model = copy.copy(loaded.decoder)
    model.__class__ = Sick
    healthy = [one for one in requests() if one.prompt_ids[0] != 255]
    sick = Request("sick", (255, 1, 2), SamplingParams())
    finished = finished_by(CanvasEngine(loaded.spec, model, max_rows=4), [*healthy[:2], sick, *healthy[2:]])
    error = finished.pop("sick").error
    assert error is not None
    assert error.code == "model_error"
    assert tokens(finished) == {one.id: alone[one.id].token_ids for one in healthy}


def test_urgent_rows_have_places_of_their_own_and_what_is_final_is_told(
    loaded: CanvasLoaded, alone: dict[Hashable, Finished]
) -> None:
    engine = fresh(loaded, max_rows=2, max_step_tokens=2 * CANVAS, urgent_rows=1)
    some = [one for one in requests() if one.id in (3, 8, 11)]
    for one in some:
        engine.add(replace(one, urgent=one.id == 11))
    assert (engine.room(), engine.room(urgent=True), engine.most_rows) == (0, 0, 3)
    told: dict[Hashable, list[int]] = {one.id: [] for one in some}
    finished: dict[Hashable, Finished] = {}
    while engine.active():
        finished |= {one.id: one for one in engine.step()}
        for name in engine.active():
            told[name] += engine.progress(name, len(told[name]))
    assert tokens(finished) == {name: alone[name].token_ids for name in finished}
    assert max(map(len, told.values())) >= CANVAS
    for name, one in finished.items():
        assert tuple(told[name]) == one.token_ids[: len(told[name])]


def test_a_canvas_in_the_way_of_an_urgent_one_is_named_and_a_row_can_be_cut(
    loaded: CanvasLoaded, alone: dict[Hashable, Finished]
) -> None:
    first, second, third = [one for one in requests() if one.id in (9, 10, 11)]
    engine = fresh(loaded, urgent_rows=1, memory_budget=2 * fresh(loaded).memory.need(85 + 4 * CANVAS))
    engine.add(first)
    engine.add(second)
    engine.step()
    engine.add(replace(third, urgent=True))
    assert engine.in_the_way() == second.id
    engine.remove(second.id)
    assert engine.in_the_way() is None
    while not engine.progress(third.id):
        engine.step()
    assert engine.cut(third.id, 3).token_ids == alone[third.id].token_ids[:3]
    assert engine.active() == [first.id]
