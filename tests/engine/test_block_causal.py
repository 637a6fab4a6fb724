"""Rows on a grid of blocks: what they compute, what it is counted as, and whose beginnings they share."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import BadPrompt
from tests import checkpoints
from tests.engine.running import drain, engine_of, prompt, request, run
from worker.engine import Engine, Loaded
from worker.engine.admission import admit
from worker.engine.prefixes import CHUNK
from worker.engine.request import Span, Target
from worker.engine.sequence import Row, State

CONTEXT = 512


def row(loaded: Loaded, length: int, **params: Any) -> Row:
    return admit(0, request("r", prompt(length, length), **{"block_length": 4, **params}), loaded.spec)


def accept_all(one: Row, span: Span) -> None:
    one.receive(span, [10 + number for number in range(len(span.targets))])


def parts(span: Span) -> tuple[int, int, int, int, int]:
    return span.start, span.prefilled, span.committed, span.fresh, span.needed


def test_a_commit_of_its_own_comes_between_two_blocks(block_causal: Loaded) -> None:
    one = row(block_causal, 10, max_new_tokens=8, commit="separate")  # positions 8, 9 are prompt; 18 … 19 fill up
    seen = []
    while one.state is not State.FINISHED:
        span = one.span(1000)
        seen.append(parts(span))
        accept_all(one, span)
    assert seen == [
        (0, 8, 0, 0, 8),
        (8, 0, 0, 4, 4),
        (8, 0, 4, 0, 4),
        (12, 0, 0, 4, 4),
        (12, 0, 4, 0, 4),
        (16, 0, 0, 4, 2),
    ]
    finished = one.finished()
    assert (finished.steps, finished.forwards, finished.positions) == (3, 5, 28)
    assert len(finished.token_ids) == 8


def test_a_fused_commit_opens_the_next_block(block_causal: Loaded) -> None:
    one = row(block_causal, 10, max_new_tokens=8)
    assert one.plan.commit == "fused"
    first = one.span(1000)
    assert parts(first) == (0, 8, 0, 4, 12)
    assert first.visible == [4] * 4 + [8] * 4 + [12] * 4
    assert [target.position for target in first.targets] == [10, 11]
    accept_all(one, first)
    second = one.span(1000)
    assert parts(second) == (8, 0, 4, 4, 8)
    assert second.tokens[:4] == [*prompt(10, 10)[8:], 10, 11]
    assert second.tokens[4:] == [checkpoints.MASK] * 4
    assert second.visible == [12] * 4 + [16] * 4
    assert [(target.offset, target.position) for target in second.targets] == [(4 + n, 12 + n) for n in range(4)]
    accept_all(one, second)
    accept_all(one, one.span(1000))
    finished = one.finished()
    assert (finished.steps, finished.forwards, finished.positions) == (3, 3, 12 + 8 + 8)


def test_a_shifted_block_is_opened_by_what_stands_before_it(shifted: Loaded) -> None:
    one = row(shifted, 8, max_new_tokens=8)
    assert one.plan.commit == "separate"
    opening = one.span(1000)
    assert parts(opening) == (0, 8, 0, 0, 8)
    assert opening.targets == [Target(7, 8, certain=True)]
    accept_all(one, opening)
    block = one.span(1000)
    assert parts(block) == (8, 0, 0, 4, 4)
    assert block.targets == [Target(0, 9), Target(1, 10), Target(2, 11)]
    accept_all(one, block)
    commit = one.span(1000)
    assert parts(commit) == (8, 0, 4, 0, 4)
    assert commit.targets == [Target(3, 12, certain=True)]


def test_a_shifted_block_that_begins_with_prompt_is_read_within_itself(shifted: Loaded) -> None:
    one = row(shifted, 10, max_new_tokens=8)
    accept_all(one, one.span(1000))
    assert one.span(1000).targets == [Target(1, 10), Target(2, 11)]


@pytest.mark.parametrize("budget", [1, 9, 1000])
def test_a_shifted_fused_block_is_opened_in_its_first_step(shifted: Loaded, budget: int) -> None:
    """Whatever the budget: its first slot is read from the prompt's last block."""
    one = row(shifted, 12, max_new_tokens=8, commit="fused")
    while not (span := one.span(budget)).fresh:
        accept_all(one, span)
    opening, *others = span.targets
    assert opening == Target(11 - span.start, 12, certain=True)
    assert others == [Target(12 + n - span.start, 13 + n) for n in range(3)]


@pytest.mark.parametrize(("budget", "lengths"), [(1, [4, 4, 4]), (7, [4, 4, 4]), (8, [8, 8]), (13, [8, 8]), (16, [16])])
def test_prefill_is_cut_between_blocks(block_causal: Loaded, budget: int, lengths: list[int]) -> None:
    """The first block that is denoised comes along where it fits."""
    one = row(block_causal, 13, max_new_tokens=8)
    found = []
    while one.state is State.PREFILLING:
        span = one.span(budget)
        found.append(len(span.tokens))
        accept_all(one, span)
    assert found == lengths


def test_a_prompt_within_the_first_block_has_no_prefill(block_causal: Loaded) -> None:
    one = row(block_causal, 3, max_new_tokens=8)
    assert one.state is State.DENOISING
    assert [target.position for target in one.span(1000).targets] == [3]


def test_a_stop_token_of_the_prompt_within_the_first_block_ends_nothing(block_causal: Loaded) -> None:
    stops = (5, checkpoints.STOP, checkpoints.MASK)
    for rule in ("threshold", "joint_threshold"):
        one = admit(0, request("r", stops, max_new_tokens=2, block_length=8, rule=rule), block_causal.spec)
        assert [target.position for target in one.span(100).targets] == [3, 4]
        accept_all(one, one.span(100))
        if one.state is not State.FINISHED:  # edits end with a step that changes nothing
            one.receive(one.span(100), [None, None])
        assert one.finished().token_ids == (10, 11)


@pytest.mark.parametrize(("length", "block_length", "room"), [(CONTEXT - 1, 4, 1), (CONTEXT - 9, 4, 9), (500, 7, 11)])
def test_prompt_and_answer_are_whole_blocks_of_the_context(
    block_causal: Loaded, length: int, block_length: int, room: int
) -> None:
    one = request("r", prompt(1, length), max_new_tokens=100, block_length=block_length)
    finished = run(block_causal, [one])["r"]
    assert finished.plan.max_new_tokens == room
    assert len(finished.token_ids) <= room


def test_a_block_may_be_the_context(block_causal: Loaded) -> None:
    assert row(block_causal, 3, block_length=CONTEXT).plan.max_new_tokens == 256
    with pytest.raises(BadPrompt, match=f"block_length: {CONTEXT + 1} does not fit"):
        row(block_causal, 3, block_length=CONTEXT + 1)


def test_a_cache_is_refused(block_causal: Loaded) -> None:
    with pytest.raises(BadPrompt, match="always uses its exact cache"):
        row(block_causal, 3, cache="dual")


def test_steps_are_shared_by_the_masks_of_a_block(block_causal: Loaded) -> None:
    """Six masks from position 3 on lie in three blocks of 4: one, four and one of them, which may take a step each."""
    one = row(block_causal, 3, max_new_tokens=6, denoise_steps=4)
    quotas = []
    while one.state is not State.FINISHED:
        span = one.span(1000)
        quotas.append(one.number())
        one.receive(span, [20 if number < one.number() else None for number in range(len(span.targets))])
    assert quotas == [1, 2, 1, 1, 1]


def shared(loaded: Loaded, block_lengths: list[int]) -> Engine:
    """Prompts that begin alike, one after the other; their tokens are those of an engine that shares nothing."""
    engine = engine_of(loaded)
    for number, block_length in enumerate(block_lengths):
        prompt_ids = (*prompt(99, 3 * CHUNK), *prompt(number, 5))
        one = request(number, prompt_ids, max_new_tokens=8, block_length=block_length)
        engine.add(one)
        assert drain(engine)[number].token_ids == run(loaded, [one], prefix_cache_mb=0)[number].token_ids
    return engine


def test_beginnings_are_shared_where_chunks_end_with_blocks(block_causal: Loaded) -> None:
    assert shared(block_causal, [4, 4, 4, 4]).prefixes.reused == 2 * 3 * CHUNK
    assert shared(block_causal, [6, 6, 6, 6]).prefixes.reused == 0
    assert shared(block_causal, [32, 32, 32]).prefixes.reused == 0


def test_rows_of_other_block_lengths_share_nothing(block_causal: Loaded) -> None:
    """Text that sees other blocks has other keys and values."""
    assert shared(block_causal, [4, 8, 4, 8, 16]).prefixes.reused == 0
    assert shared(block_causal, [4, 8, 4, 8, 4, 8]).prefixes.reused == 2 * 3 * CHUNK


def test_a_prompt_that_is_known_to_its_last_block_begins_with_denoising(block_causal: Loaded) -> None:
    engine = engine_of(block_causal)
    prompt_ids = prompt(99, 2 * CHUNK + 3)
    answers = set()
    for number in range(3):
        engine.add(request(number, prompt_ids, max_new_tokens=8, block_length=CHUNK, commit="separate"))
        answers.add(drain(engine)[number].token_ids)
    assert engine.prefixes.reused == 2 * CHUNK
    assert engine.stats.prefill_positions == 2 * 2 * CHUNK
    assert len(answers) == 1
