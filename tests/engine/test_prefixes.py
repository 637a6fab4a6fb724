"""What several prompts begin with is computed once, and nobody's tokens change by it."""

from __future__ import annotations

import pytest

from tests.engine.running import drain, engine_of, prompt, request
from worker.engine import Engine, Loaded, Request
from worker.engine.prefixes import CHUNK

SYSTEM = prompt(99, 5 * CHUNK + 3)
SHARED = 5 * CHUNK  # whole chunks


def requests(count: int, first: int = 0) -> list[Request]:
    return [request(n, (*SYSTEM, *prompt(n, 7 + n)), max_new_tokens=8) for n in range(first, first + count)]


def answers(engine: Engine, prompts: list[Request]) -> dict[object, tuple[int, ...]]:
    for one in prompts:
        engine.add(one)
    return {name: one.token_ids for name, one in drain(engine).items()}


def test_prompts_that_come_together_compute_their_beginning_once(causal: Loaded) -> None:
    engine = engine_of(causal)
    shared = answers(engine, requests(6))
    assert engine.stats.prefill_positions == sum(len(one.prompt_ids) for one in requests(6)) - 5 * SHARED
    assert engine.prefixes.reused == 5 * SHARED
    assert shared == answers(Engine(causal.spec, causal.decoder, prefix_cache_mb=0), requests(6))


def test_a_beginning_is_kept_for_later_prompts_once_a_second_one_had_it(causal: Loaded) -> None:
    engine = engine_of(causal)
    reused = []
    for one in requests(4):
        answers(engine, [one])
        reused.append(engine.prefixes.reused)
    assert reused == [0, 0, SHARED, 2 * SHARED]


def test_one_prompt_twice_computes_its_last_token_again(causal: Loaded) -> None:
    engine = engine_of(causal)
    same = [request(n, SYSTEM[:SHARED], max_new_tokens=8) for n in range(3)]
    found = answers(engine, same)
    assert len(set(found.values())) == 1
    assert engine.prefixes.reused == 2 * (SHARED - CHUNK)


def test_rows_that_wait_go_on_when_the_one_they_wait_for_leaves(causal: Loaded) -> None:
    engine = engine_of(causal, max_step_tokens=CHUNK)
    for one in requests(3):
        engine.add(one)
    engine.step()
    assert engine.scheduler.held == {1, 2}
    assert engine.remove(0)
    assert set(drain(engine)) == {1, 2}
    assert not engine.scheduler.held


def test_memory_for_beginnings_is_bounded_and_the_longest_unused_goes_first(causal: Loaded) -> None:
    engine = engine_of(causal)
    engine.prefixes.most = 8
    texts = [prompt(seed, 4 * CHUNK + 1) for seed in range(5)]
    for name, text in enumerate([texts[0], texts[0], texts[1], texts[1], texts[0], texts[2], texts[2], texts[0]]):
        answers(engine, [request(name, text, max_new_tokens=4)])
    assert engine.prefixes.reused == 2 * 4 * CHUNK  # texts[0] was asked for between the others and stayed
    assert len(engine.prefixes.stored) <= 8


@pytest.mark.parametrize("mb", [0, 256])
def test_bidirectional_rows_share_nothing(bidirectional: Loaded, mb: int) -> None:
    engine = Engine(bidirectional.spec, bidirectional.decoder, prefix_cache_mb=mb)
    answers(engine, requests(3))
    assert engine.prefixes.reused == 0
