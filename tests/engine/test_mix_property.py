"""A prompt's tokens do not depend on its neighbours, on when it came, or on how the engine is limited.

Nor does what is told of them while they come into being.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.sampling import Rule, SamplingParams
from tests.engine.running import engine_of, prompt, run
from worker.engine import Finished, Loaded, Request

PROMPTS = 40
RULES = sorted(get_args(Rule))
LONGEST = 300  # two moves to a larger cache slot
BUDGETS = (1, 3, 8, 17, 64, 200, 2048)
bounded = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@dataclass(frozen=True)
class Guest:
    """A prompt of the pool that enters a mix at a step, and is taken out at a later one if it is not done by then."""

    which: int
    arrives: int
    leaves: int | None
    urgent: bool


guests = st.builds(
    Guest,
    which=st.integers(0, PROMPTS - 1),
    arrives=st.one_of(st.just(0), st.integers(0, 20)),
    leaves=st.one_of(st.none(), st.none(), st.integers(1, 20)),
    urgent=st.booleans(),
)
mixes = st.lists(guests, min_size=2, max_size=9, unique_by=lambda guest: guest.which)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_with_a_causal_context(
    causal: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(causal, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_block_causal_rows(
    block_causal: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(block_causal, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_shifted_blocks(
    shifted: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(shifted, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_when_bidirectional(
    bidirectional: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(bidirectional, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_blocks_that_are_counted_from_the_answer(
    bd3lm: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(bd3lm, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_rows_whose_last_block_is_cut(
    cut: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(cut, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_unshifted_blocks_after_a_causal_context(
    nemotron: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(nemotron, mix, max_rows, max_step_tokens)


@bounded
@given(mix=mixes, max_rows=st.integers(1, 8), max_step_tokens=st.sampled_from(BUDGETS))
def test_tokens_are_the_same_alone_and_in_any_mix_of_causal_rows(
    wedlm: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int
) -> None:
    hold(wedlm, mix, max_rows, max_step_tokens)


def test_the_pool_holds_every_kind_of_prompt() -> None:
    """The property is worth as much as the prompts that it ranges over."""
    for attention in ("causal", "causal_context", "block_causal", "bidirectional"):
        params = [pool_request(attention, which).params for which in range(PROMPTS)]
        assert {one.rule for one in params} == set(rules_of(attention))
        assert 5 < sum(one.temperature > 0 for one in params) < PROMPTS - 5
    assert {one.cache for one in params} == {"none", "prefix", "dual"}
    assert any(len(pool_request(attention, which).prompt_ids) > 128 for which in range(PROMPTS))


def hold(loaded: Loaded, mix: list[Guest], max_rows: int, max_step_tokens: int) -> None:
    """Run `mix`, compare every guest that stayed with its lonely run, and find nothing left behind."""
    engine = engine_of(loaded, max_rows=max_rows, max_step_tokens=max_step_tokens, urgent_rows=1)
    finished: dict[Any, Finished] = {}
    told: dict[Any, list[int]] = {guest.which: [] for guest in mix}
    removed: set[int] = set()
    waiting = sorted(mix, key=lambda guest: guest.arrives)
    step = 0
    while waiting or engine.active():
        while waiting and waiting[0].arrives <= step:
            guest = waiting.pop(0)
            engine.add(replace(pool_request(loaded.spec.attention, guest.which), urgent=guest.urgent))
        for guest in mix:
            if guest.leaves is not None and guest.arrives + guest.leaves == step and engine.remove(guest.which):
                removed.add(guest.which)
        for one in engine.step():
            assert one.id not in finished
            finished[one.id] = one
        for which in engine.active():
            told[which] += engine.progress(which, len(told[which]))
        step += 1
    assert finished.keys() | removed == {guest.which for guest in mix}
    assert not finished.keys() & removed
    for which, one in finished.items():
        assert outcome(one) == outcome(alone(loaded, which))
        assert tuple(told[which]) == one.token_ids[: len(told[which])]
    assert len(engine.runner.slots) == len(engine.runner.history) == 0
    assert not engine.prefixes.leading


@cache
def alone(loaded: Loaded, which: int) -> Finished:
    return run(loaded, [pool_request(loaded.spec.attention, which)])[which]


def outcome(finished: Finished) -> Finished:
    """Everything but the time, and what had to be computed: a prompt's beginning may be known from another one."""
    return replace(finished, seconds=0.0, positions=0)


def rules_of(attention: str) -> list[str]:
    """Those that make sense: a window of masks has no blocks to edit."""
    return [rule for rule in RULES if attention != "causal" or rule != "joint_threshold"]


@cache
def pool_request(attention: str, which: int) -> Request:
    """Prompt number `which`: fixed once, so that mixes differ in their make-up and every lonely run is made once."""
    draw = random.Random(which)
    rule = draw.choice(rules_of(attention))
    params: dict[str, Any] = {"rule": rule, "max_new_tokens": draw.randint(1, 30)}
    params["block_length"] = draw.choice([1, 2, 4, 7, 16])
    if rule == "fixed_steps":
        params["denoise_steps"] = draw.randint(1, 30)
    elif rule == "entropy_bound":
        params["entropy_bound"] = draw.choice([0.0, 0.1, 1.0, 5.0])
    elif rule == "factor":
        params["factor"] = draw.choice([0.5, 1.0, 3.0])
    elif rule == "entropy_threshold":
        params["entropy_threshold"] = draw.choice([0.1, 0.4, 2.0])
    else:
        params["threshold"] = draw.choice([0.3, 0.6, 0.9, 1.0])
    if rule == "joint_threshold":
        params["edit_threshold"] = draw.choice([0.2, 0.5, 0.9])
    if rule == "klass":
        params["kl_threshold"] = draw.choice([0.1, 2.0, 50.0])
    if draw.random() < 0.5:
        params |= {"temperature": draw.choice([0.5, 1.0, 2.0]), "seed": draw.randrange(2**63)}
        params |= {"top_p": draw.choice([0.5, 0.9, 1.0]), "top_k": draw.choice([0, 3, 40])}
    if attention == "bidirectional":
        params["cache"] = draw.choice(["none", "prefix", "dual"])
        if params["cache"] != "none":
            params["cache_refresh"] = draw.choice([1, 2, 3])
    elif attention != "causal":
        params["commit"] = draw.choice(["separate", "fused"])
    length = draw.choice([draw.randint(1, 12), draw.randint(1, 60), draw.randint(100, LONGEST)])
    shared = prompt(-1, draw.choice([0, 16, 40, 120]))  # some prompts begin alike
    return Request(which, shared + prompt(which, length), SamplingParams(**params))
