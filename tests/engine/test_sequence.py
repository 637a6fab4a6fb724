"""Where answers end, what is cut, and which prompts are turned away."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import BadPrompt
from tests import checkpoints
from tests.engine.running import engine_of, prompt, request, run
from worker.engine import Loaded
from worker.engine.admission import admit
from worker.engine.models.spec import ModelSpec
from worker.engine.request import Target
from worker.engine.sequence import EDIT_STEPS, Row, State

CONTEXT = 512


def row(loaded: Loaded, length: int, **params: Any) -> Row:
    return admit(0, request("r", prompt(length, length), **params), loaded.spec)


def play(one: Row, tokens: list[int]) -> list[list[int]]:
    """Feed `tokens` to the row, one target accepted a step; returns the positions predicted in each forward."""
    asked = []
    left = list(tokens)
    while one.state is not State.FINISHED:
        span = one.span(1000)
        asked.append([target.position for target in span.targets])
        one.receive(span, [left.pop(0) if i == 0 and left else None for i in range(len(span.targets))])
    assert not left
    return asked


def test_a_stop_token_ends_the_answer_and_is_left_out(either: Loaded) -> None:
    one = row(either, 3, max_new_tokens=20, block_length=4)
    play(one, [10, 11, 12, 13, 14, checkpoints.STOP])
    finished = one.finished()
    assert finished.token_ids == (10, 11, 12, 13, 14)
    assert finished.finish_reason == "stop"


def test_a_stop_token_at_once_is_an_empty_answer(either: Loaded) -> None:
    one = row(either, 3, max_new_tokens=20, block_length=4)
    play(one, [checkpoints.STOP])
    assert one.finished().token_ids == ()
    assert one.finished().finish_reason == "stop"


@pytest.mark.parametrize("wanted", [1, 3, 4, 5, 9])
def test_an_answer_without_a_stop_token_has_the_length_asked_for(either: Loaded, wanted: int) -> None:
    one = row(either, 3, max_new_tokens=wanted, block_length=4)
    play(one, list(range(10, 10 + wanted)))
    assert one.finished().token_ids == tuple(range(10, 10 + wanted))
    assert one.finished().finish_reason == "length"


def test_a_row_waits_for_masks_before_a_stop_token(bidirectional: Loaded) -> None:
    """A stop token placed out of order ends nothing while something before it is open."""
    one = row(bidirectional, 3, max_new_tokens=8, block_length=4)
    one.receive(one.span(100), [None, checkpoints.STOP, None, None])
    assert one.state is State.DENOISING
    one.receive(one.span(100), [10, None, None])
    assert one.state is State.FINISHED
    assert one.finished().token_ids == (10,)


def editing(loaded: Loaded, **params: Any) -> Row:
    """A row whose rule edits, its first block open: the causal kind has its first slot, 9, by then."""
    one = row(loaded, 3, rule="joint_threshold", block_length=4, **params)
    if one.state is State.PREFILLING:
        one.receive(one.span(100), [9])
    return one


def test_placed_tokens_are_targets_of_a_rule_that_edits(bidirectional: Loaded) -> None:
    one = editing(bidirectional, max_new_tokens=8)
    assert one.span(100).targets == [Target(position, position) for position in (3, 4, 5, 6)]
    one.receive(one.span(100), [None, 11, None, None])
    assert one.span(100).targets == [Target(3, 3), Target(4, 4, token=11), Target(5, 5), Target(6, 6)]


def test_the_slot_that_opened_a_causal_block_is_not_edited(causal: Loaded) -> None:
    """Its prediction was read before the block, whose queries come no earlier than itself."""
    one = editing(causal, max_new_tokens=8)
    assert [target.position for target in one.span(100).targets] == [4, 5, 6]


def test_a_block_that_is_edited_ends_with_a_step_that_changes_nothing(either: Loaded) -> None:
    one = editing(either, max_new_tokens=8)
    count, last = len(one.span(100).targets), one.span(100).targets[-1].position
    block = one.block_start
    one.receive(one.span(100), list(range(10, 10 + count)))
    assert (one.state, one.block_start) == (State.DENOISING, block)
    one.receive(one.span(100), [*[None] * (count - 1), 20])
    assert (one.state, one.block_start) == (State.DENOISING, block)
    one.receive(one.span(100), [None] * count)
    assert one.state is State.COMMITTING or one.block_start == block + 4
    assert one.canvas[last] == 20


def test_edits_without_end_are_cut_off(either: Loaded) -> None:
    one = editing(either, max_new_tokens=1 if either.spec.attention == "block_causal" else 4)  # one block
    steps = 0
    while one.state is State.DENOISING:
        span = one.span(100)
        one.receive(span, [10 + (target.token == 10) for target in span.targets])
        steps += 1
    assert one.state is State.FINISHED
    assert steps == 1 + EDIT_STEPS


def test_a_stop_token_ends_an_edited_answer_only_when_it_stays(bidirectional: Loaded) -> None:
    one = editing(bidirectional, max_new_tokens=4)
    one.receive(one.span(100), [10, checkpoints.STOP, None, None])
    assert one.span(100).targets == [
        Target(3, 3, token=10),
        Target(4, 4, token=checkpoints.STOP),
    ]  # what is behind it is not asked
    one.receive(one.span(100), [None, 11])
    assert [target.token for target in one.span(100).targets] == [10, 11, None, None]
    one.receive(one.span(100), [None, None, checkpoints.STOP, None])
    one.receive(one.span(100), [None, None, None])
    assert one.state is State.FINISHED
    assert one.finished().token_ids == (10, 11)


def test_a_stop_token_of_the_prompt_ends_nothing(either: Loaded) -> None:
    stops = (checkpoints.STOP, 5, checkpoints.STOP)
    one = admit(0, request("r", stops, max_new_tokens=2, block_length=4), either.spec)
    play(one, [10, 11])
    assert one.finished().token_ids == (10, 11)
    assert one.finished().prompt_tokens == 3


def test_a_mask_token_of_the_prompt_is_not_filled(either: Loaded) -> None:
    masks = (5, checkpoints.MASK, checkpoints.MASK)
    asked = play(admit(0, request("r", masks, max_new_tokens=4, block_length=4), either.spec), [10, 11, 12, 13])
    assert min(position for positions in asked for position in positions) == 3


def test_blocks_are_denoised_from_left_to_right(either: Loaded) -> None:
    asked = play(row(either, 3, max_new_tokens=8, block_length=4), list(range(10, 18)))
    predicted = [positions for positions in asked if positions]
    if either.spec.attention == "bidirectional":
        assert predicted == [[3, 4, 5, 6], [4, 5, 6], [5, 6], [6], [7, 8, 9, 10], [8, 9, 10], [9, 10], [10]]
    elif either.spec.attention == "block_causal":
        assert predicted == [[3], [4, 5, 6, 7], [5, 6, 7], [6, 7], [7], [8, 9, 10], [9, 10], [10]]
    else:
        # Prefill and the commit predict a block's first slot.
        assert predicted == [[3], [4, 5, 6], [5, 6], [6], [7], [8, 9, 10], [9, 10], [10]]


def test_steps_and_forwards_are_counted(causal: Loaded) -> None:
    """Prefill is no forward of the answer; the commit between two blocks is one, but no step."""
    one = row(causal, 3, max_new_tokens=8, block_length=4)
    play(one, list(range(10, 18)))
    finished = one.finished()
    assert (finished.steps, finished.forwards) == (6, 7)
    assert finished.positions == 3 + 7 * 4
    assert finished.tokens_per_forward == pytest.approx(8 / 7)


@pytest.mark.parametrize(("length", "room"), [(CONTEXT - 4, 4), (CONTEXT - 5, 4), (CONTEXT - 9, 8)])
def test_a_causal_answer_is_cut_to_whole_blocks_of_the_context(causal: Loaded, length: int, room: int) -> None:
    finished = run(causal, [request("r", prompt(1, length), max_new_tokens=100)])["r"]
    assert finished.plan.max_new_tokens == room
    assert len(finished.token_ids) <= room


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 7])
def test_a_bidirectional_answer_is_cut_to_the_context(bidirectional: Loaded, length: int) -> None:
    finished = run(bidirectional, [request("r", prompt(1, length), max_new_tokens=100)])["r"]
    assert finished.plan.max_new_tokens == CONTEXT - length
    assert len(finished.token_ids) <= CONTEXT - length


def test_an_empty_prompt_is_turned_away(either: Loaded) -> None:
    with pytest.raises(BadPrompt, match="no tokens") as caught:
        row(either, 0)
    assert caught.value.code == "empty_prompt"


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5000])
def test_a_prompt_without_room_for_an_answer_is_turned_away_with_the_limit(either: Loaded, length: int) -> None:
    with pytest.raises(BadPrompt) as caught:
        row(either, length, block_length=4)
    assert caught.value.code == "prompt_too_long"
    assert str(CONTEXT) in str(caught.value)
    assert str(length) in str(caught.value)


@pytest.mark.parametrize("block_length", [1, 4, 7])
def test_the_longest_prompt_that_is_named_runs_and_one_more_does_not(either: Loaded, block_length: int) -> None:
    with pytest.raises(BadPrompt) as caught:
        row(either, CONTEXT, block_length=block_length)
    longest = int(str(caught.value).rsplit("longest prompt: ", 1)[1].split()[0])
    assert row(either, longest, block_length=block_length).plan.max_new_tokens >= 1
    with pytest.raises(BadPrompt):
        row(either, longest + 1, block_length=block_length)


@pytest.mark.parametrize("length", [CONTEXT - 2, CONTEXT, 3 * CONTEXT])
@pytest.mark.parametrize("truncate", ["left", "middle"])
def test_a_prompt_is_cut_where_it_asks_for_that(either: Loaded, length: int, truncate: str) -> None:
    one = row(either, length, truncate=truncate, max_new_tokens=30, block_length=4)
    whole, kept = prompt(length, length), one.request.prompt_ids
    assert len(kept) == CONTEXT - (32 if either.spec.attention == "causal_context" else 30)
    first = len(kept) // 2 if truncate == "middle" else 0
    assert kept == whole[:first] + whole[length - (len(kept) - first) :]
    assert one.plan.max_new_tokens == 30
    assert one.plan.notes == (f"prompt cut from {length} to {len(kept)} tokens (truncate: {truncate})",)


def test_half_of_the_context_stays_prompt(either: Loaded) -> None:
    one = row(either, 2 * CONTEXT, truncate="left", max_new_tokens=10 * CONTEXT, block_length=4)
    assert len(one.request.prompt_ids) == one.plan.max_new_tokens == CONTEXT // 2
    assert len(one.plan.notes) == 2


def test_a_prompt_that_fits_is_not_cut(either: Loaded) -> None:
    one = row(either, 50, truncate="middle", max_new_tokens=30)
    assert one.request.prompt_ids == prompt(50, 50)
    assert one.plan.notes == ()


def test_an_answer_that_passes_the_context_is_cut_with_a_note(either: Loaded) -> None:
    one = row(either, CONTEXT - 40, max_new_tokens=100, block_length=4)
    assert one.plan.max_new_tokens == 40
    assert one.plan.notes == (f"max_new_tokens cut from 100 to 40: the context has {CONTEXT} positions",)


def test_a_block_that_never_fits_is_a_matter_of_the_parameters(causal: Loaded, bidirectional: Loaded) -> None:
    with pytest.raises(BadPrompt, match=f"block_length: {CONTEXT} does not fit") as caught:
        row(causal, 3, block_length=CONTEXT)
    assert caught.value.code == "bad_params"
    assert row(bidirectional, 3, block_length=CONTEXT).plan.max_new_tokens == 256


def test_a_rejected_prompt_leaves_nothing_in_the_engine(either: Loaded) -> None:
    engine = engine_of(either)
    with pytest.raises(BadPrompt):
        engine.add(request("r", ()))
    assert engine.active() == []
    assert engine.step() == []


@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_a_cache_is_refused_where_it_has_no_meaning(causal: Loaded, cache: str) -> None:
    with pytest.raises(BadPrompt, match="cache") as caught:
        row(causal, 3, cache=cache)
    assert caught.value.code == "bad_params"


def test_left_out_parameters_are_the_models_own(either: Loaded) -> None:
    spec: ModelSpec = either.spec
    plan = row(either, 3).plan
    assert (plan.rule, plan.number, plan.block_length) == (spec.rule, spec.threshold, spec.block_length)
    assert (plan.cache, plan.temperature, plan.max_new_tokens) == ("none", 0.0, 256)


def test_steps_alone_choose_the_rule_with_steps(either: Loaded) -> None:
    plan = row(either, 3, denoise_steps=9).plan
    assert (plan.rule, plan.denoise_steps) == ("fixed_steps", 9)


def test_an_answer_takes_as_many_steps_as_asked_for(bidirectional: Loaded) -> None:
    """Ten steps over three blocks of 4, 4 and 2: 4 + 3 + 3, the last of them at most one a mask."""
    requests = [request(n, prompt(n, 5), max_new_tokens=10, block_length=4, denoise_steps=10) for n in range(20)]
    finished = run(bidirectional, requests).values()
    assert {one.steps for one in finished if one.finish_reason == "length"} == {4 + 3 + 2}
