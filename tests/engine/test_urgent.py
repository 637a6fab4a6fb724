"""Urgent rows enter a full engine, go first, and make others wait where memory has no room; what is final is told."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from tests.engine.running import drain, engine_of, prompt, request
from worker.engine import Engine, Loaded, Request

KINDS = ["causal", "block_causal", "bidirectional", "wedlm"]


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest) -> Loaded:
    loaded: Loaded = request.getfixturevalue(request.param)
    return loaded


def ordinary(name: Hashable, length: int = 6, **params: object) -> Request:
    return request(name, prompt(1, length), **{"max_new_tokens": 16, "threshold": 1.0, **params})


def urgent(name: Hashable, length: int = 6, **params: object) -> Request:
    one = ordinary(name, length, **params)
    return Request(one.id, one.prompt_ids, one.params, urgent=True)


def test_urgent_rows_have_places_that_others_may_not_take(causal: Loaded) -> None:
    engine = engine_of(causal, max_rows=2, urgent_rows=1)
    assert (engine.room(), engine.room(urgent=True), engine.most_rows) == (2, 3, 3)
    for name in range(2):
        engine.add(ordinary(name))
    assert (engine.room(), engine.room(urgent=True)) == (0, 1)
    engine.step()
    engine.add(ordinary("waits"))
    engine.add(urgent("a"))
    engine.step()
    assert {row.request.id for row in engine.scheduler.running} == {0, 1, "a"}
    assert [row.request.id for row in engine.scheduler.waiting] == ["waits"]


def test_urgent_rows_may_take_all_places_and_others_then_wait(causal: Loaded) -> None:
    engine = engine_of(causal, max_rows=2, urgent_rows=1)
    for name in "abc":
        engine.add(urgent(name))
    assert engine.room() == engine.room(urgent=True) == 0
    engine.add(ordinary("waits"))
    engine.step()
    assert [row.request.id for row in engine.scheduler.waiting] == ["waits"]


def test_an_urgent_row_is_in_every_forward_however_small_the_budget(bidirectional: Loaded) -> None:
    """Others take turns: a step computes one whole canvas here."""
    engine = engine_of(bidirectional, max_rows=4, urgent_rows=1, max_step_tokens=25)
    for name in range(4):
        engine.add(ordinary(name))
    engine.add(urgent("a"))
    steps, ended = 0, {}
    while "a" not in ended:
        ended |= {one.id: one for one in engine.step()}
        steps += 1
    assert steps == ended["a"].steps > 8
    assert len(drain(engine)) == 4


def test_the_youngest_row_that_is_not_urgent_is_in_the_way_of_one_that_is(causal: Loaded) -> None:
    slot = Engine(causal.spec, causal.decoder).memory.need(128)
    engine = Engine(causal.spec, causal.decoder, urgent_rows=2, memory_budget=3 * slot)
    for name in range(3):
        engine.add(ordinary(name))
    engine.step()
    assert engine.in_the_way() is None
    engine.add(urgent("a"))
    engine.add(urgent("b", length=130))  # two slots
    assert engine.in_the_way() == 2
    assert engine.remove(2)
    assert engine.in_the_way() is None
    engine.step()
    assert [engine.in_the_way(), engine.remove(1), engine.in_the_way(), engine.remove(0)] == [1, True, 0, True]
    assert engine.in_the_way() is None
    assert drain(engine).keys() == {"a", "b"}


def test_an_urgent_row_alone_is_in_nobodys_way(causal: Loaded) -> None:
    slot = Engine(causal.spec, causal.decoder).memory.need(128)
    engine = Engine(causal.spec, causal.decoder, urgent_rows=2, memory_budget=slot)
    for name in "ab":
        engine.add(urgent(name))
    engine.step()
    assert engine.in_the_way() is None  # it waits for its like
    assert drain(engine).keys() == {"a", "b"}


def test_what_is_final_is_told_block_by_block(any_kind: Loaded) -> None:
    engine = engine_of(any_kind)
    engine.add(ordinary("a", block_length=4))
    told: list[int] = []
    pieces = 0
    while engine.active():
        (*finished,) = engine.step()
        more = engine.progress("a", len(told))
        told += more
        pieces += bool(more)
    assert pieces > 1
    assert tuple(told) == finished[0].token_ids[: len(told)]
    assert len(told) >= len(finished[0].token_ids) - 4
    assert engine.progress("a") == []


def test_a_row_can_be_cut_where_it_stands(any_kind: Loaded) -> None:
    whole = engine_of(any_kind)
    whole.add(ordinary("a"))
    answer = drain(whole)["a"].token_ids
    engine = engine_of(any_kind)
    engine.add(ordinary("a", block_length=4))
    while len(engine.progress("a")) < 6:
        engine.step()
    cut = engine.cut("a", 5)
    assert (len(cut.token_ids), cut.finish_reason, cut.error) == (5, "stop", None)
    assert 0 < cut.steps < 16
    assert engine.active() == []
    assert len(engine.runner.slots) == 0
    assert len(answer) > 5
