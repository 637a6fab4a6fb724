"""The engine's front: who is in it, who leaves, and who waits for whom."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from tests import checkpoints
from tests.engine.running import drain, engine_of, prompt, request, run
from worker.engine import Engine, Finished, Loaded, Request


def requests(count: int, **params: Any) -> list[Request]:
    usual = {"max_new_tokens": 12, "block_length": 4}
    return [request(n, prompt(n, 3 + n), **{**usual, **params}) for n in range(count)]


def tokens(finished: dict[Hashable, Finished]) -> dict[Hashable, tuple[int, ...]]:
    return {name: one.token_ids for name, one in finished.items()}


def test_an_engine_without_rows_does_nothing(either: Loaded) -> None:
    engine = engine_of(either)
    assert engine.step() == []
    assert engine.stats.steps == 0


def test_room_is_what_would_run_at_once(either: Loaded) -> None:
    engine = engine_of(either, max_rows=3)
    assert engine.room() == 3
    for number, one in enumerate(requests(5)):
        engine.add(one)
        assert engine.room() == max(0, 2 - number)
    engine.step()
    assert engine.room() == 0
    drain(engine)
    assert engine.room() == 3


def test_active_names_running_and_waiting_rows(either: Loaded) -> None:
    engine = engine_of(either, max_rows=2)
    for one in requests(4):
        engine.add(one)
    assert sorted(engine.active()) == [0, 1, 2, 3]
    left = {0, 1, 2, 3}
    while left:
        left -= {one.id for one in engine.step()}
        assert set(engine.active()) == left


def test_no_more_rows_run_than_the_ceiling(either: Loaded) -> None:
    engine = engine_of(either, max_rows=3)
    for one in requests(10):
        engine.add(one)
    finished: set[Hashable] = set()
    while engine.active():
        before = engine.stats.rows
        finished |= {one.id for one in engine.step()}
        assert engine.stats.rows - before <= 3
    assert finished == set(range(10))


@pytest.mark.parametrize("budget", [8, 50])
def test_a_step_keeps_to_its_budget_unless_one_row_alone_exceeds_it(either: Loaded, budget: int) -> None:
    engine = engine_of(either, max_step_tokens=budget)
    for one in requests(10):
        engine.add(one)
    while engine.active():
        before = engine.stats
        engine.step()
        assert engine.stats.positions - before.positions <= budget or engine.stats.rows - before.rows == 1


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_removed_row_gives_no_result_and_the_others_stay_as_they_are(either: Loaded, after: int) -> None:
    alone = tokens(run(either, requests(5)))
    engine = engine_of(either, max_rows=4)
    for one in requests(5):
        engine.add(one)
    finished: dict[Hashable, Finished] = {}
    for _ in range(after):
        finished |= {one.id: one for one in engine.step()}
    gone = [name for name in (1, 4) if name in engine.active()]  # one that runs, one that may still wait
    assert gone
    assert all(engine.remove(name) for name in gone)
    assert not set(gone) & set(engine.active())
    finished |= drain(engine)
    assert tokens(finished) == {name: alone[name] for name in range(5) if name not in gone}
    assert len(engine.runner.slots) == 0


def test_removing_what_is_not_here_says_so(either: Loaded) -> None:
    engine = engine_of(either)
    assert not engine.remove("nobody")
    engine.add(request("r", (1, 2)))
    assert engine.remove("r")
    assert not engine.remove("r")
    assert engine.step() == []


def test_a_removed_prompt_can_come_again(either: Loaded) -> None:
    one = request("r", prompt(1, 9), max_new_tokens=8, block_length=4)
    engine = engine_of(either)
    engine.add(one)
    engine.step()
    engine.remove("r")
    engine.add(one)
    assert tokens(drain(engine)) == tokens(run(either, [one]))


@pytest.mark.parametrize("params", [{}, {"rule": "entropy_bound"}, {"temperature": 1.0, "seed": 3}])
def test_a_row_that_becomes_nan_fails_alone(either: Loaded, params: dict[str, Any]) -> None:
    """Its neighbours share attention calls, slots and the head with it, before and after it fails."""
    healthy = requests(6, **params)
    expected = tokens(run(either, healthy))
    seen = {token for one in healthy for token in (*one.prompt_ids, *expected[one.id])}
    poison = next(token for token in range(256) if token not in seen)
    engine = Engine(either.spec, poisoned(either, poison).decoder, max_rows=4)
    sick = [request(f"sick {n}", (*prompt(n, n + 2), poison), max_new_tokens=12, **params) for n in range(4)]
    for one in (healthy[0], sick[0], healthy[1], sick[1], sick[2], *healthy[2:], sick[3]):
        engine.add(one)
    finished = drain(engine)
    assert {name: finished[name].token_ids for name in expected} == expected
    assert all(finished[name].error is None for name in expected)
    errors = [finished[one.id].error for one in sick]
    assert [error.code for error in errors if error] == ["model_error"] * 4


def test_a_long_prompt_does_not_hold_up_those_that_run(causal: Loaded) -> None:
    """It prefills with what the others leave of the budget."""
    short = requests(2, rule="left_to_right", threshold=1.0)
    undisturbed = last_steps(engine_of(causal, max_step_tokens=16), short, [])
    long = request("long", prompt(99, 400), max_new_tokens=4)
    disturbed = last_steps(engine_of(causal, max_step_tokens=16), short, [long])
    assert {name: disturbed[name] for name in undisturbed} == undisturbed
    assert disturbed["long"] > 400 // 16


def test_a_long_prompt_that_came_first_lets_others_in(causal: Loaded) -> None:
    """Rows that the budget left out come first in the next step: nobody waits for the whole prefill."""
    short = requests(2, rule="left_to_right", threshold=1.0)
    undisturbed = last_steps(engine_of(causal, max_step_tokens=16), short, [])
    engine = engine_of(causal, max_step_tokens=16)
    engine.add(request("long", prompt(99, 400), max_new_tokens=4))
    disturbed = last_steps(engine, short, [])
    assert all(disturbed[name] <= undisturbed[name] + 2 for name in undisturbed)
    assert disturbed["long"] > 400 // 16


def test_a_canvas_larger_than_the_budget_takes_turns(bidirectional: Loaded) -> None:
    """It cannot be cut, so it has steps of its own; the others have every second one."""
    params = {"rule": "fixed_steps", "denoise_steps": 12}
    short = requests(2, **params)
    alone = last_steps(engine_of(bidirectional, max_step_tokens=40), short, [])
    engine = engine_of(bidirectional, max_step_tokens=40)
    engine.add(request("long", prompt(99, 400), max_new_tokens=60, denoise_steps=60))
    together = last_steps(engine, short, [])
    assert all(together[name] <= 2 * alone[name] + 2 for name in alone)
    assert "long" in together


def test_totals_add_up(either: Loaded) -> None:
    engine = engine_of(either, max_step_tokens=64)
    for one in requests(7):
        engine.add(one)
    finished = drain(engine)
    stats = engine.stats
    assert stats.positions == sum(one.positions for one in finished.values())
    assert stats.steps <= stats.rows <= stats.positions <= stats.attention_cells <= stats.attention_padded
    assert stats.seconds > 0


def test_no_mask_is_left_in_an_answer(either: Loaded) -> None:
    finished = run(either, requests(20, max_new_tokens=23))
    assert all(checkpoints.MASK not in one.token_ids for one in finished.values())
    assert all(checkpoints.STOP not in one.token_ids for one in finished.values())
    assert {one.finish_reason for one in finished.values()} == {"stop", "length"}


def poisoned(loaded: Loaded, token: int) -> Loaded:
    """The same model, but reading `token` gives NaN; the head is whole, so that nobody else meets it."""
    decoder = copy.copy(loaded.decoder)
    decoder.embed = decoder.embed.clone()
    decoder.embed[token] = torch.nan
    return Loaded(loaded.spec, decoder)


def last_steps(engine: Engine, first: list[Request], later: list[Request]) -> dict[Hashable, int]:
    """The step in which each row ended; `later` come once the others have made two steps."""
    for one in first:
        engine.add(one)
    ended: dict[Hashable, int] = {}
    step = 0
    while engine.active() or later:
        if step == 2:
            for one in later:
                engine.add(one)
            later = []
        ended |= {one.id: step for one in engine.step()}
        step += 1
    return ended
