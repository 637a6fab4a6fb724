"""Rows that denoise by the order of their input, and WeDLM, which is their only family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import BadPrompt
from tests import checkpoints
from tests.engine.reference import Recipe, Reference, masked, worth_comparing
from tests.engine.running import drain, engine_of, prompt, request, run
from tests.engine.test_against_reference import LENGTHS, RULES, engine_answers, opening, recipe_of, recording
from worker.engine import Loaded, load
from worker.engine.admission import admit
from worker.engine.models.decoder import shapes
from worker.engine.models.registry import model_spec
from worker.engine.prefixes import CHUNK
from worker.engine.request import Span, Target
from worker.engine.sequence import Row, State

CONTEXT = 512
# Seeds under which the rounding of logits, which reach 20, stays below 1e-4.
WEIGHTS: dict[str, dict[str, Any]] = {
    "8b": {"shape": checkpoints.QWEN3, "seed": 2},
    "7b": {"shape": checkpoints.QWEN2_CALM, "seed": 3},
}


@pytest.fixture(scope="module", params=WEIGHTS)
def weights(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WEIGHTS[request.param]


@pytest.fixture(scope="module")
def loaded(weights: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = checkpoints.wedlm(tmp_path_factory.mktemp("wedlm"), tokenizer=False, **weights)
    return load(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def reference(weights: dict[str, Any]) -> Reference:
    return Reference(tied=False, **weights)


def row(loaded: Loaded, length: int, **params: Any) -> Row:
    return admit(0, request("r", prompt(length, length), **{"block_length": 4, **params}), loaded.spec)


def parts(span: Span) -> tuple[int, int, int, int, int]:
    return span.start, span.prefilled, span.committed, span.fresh, span.needed


def test_logits_agree_on_mixed_lengths(loaded: Loaded, reference: Reference) -> None:
    """In every forward, with gaps in the window and without."""
    engine, logits = recording(loaded)
    for n in (*LENGTHS, 2, 17, 23, 31):  # enough rows that some window has a gap
        engine.add(request(n, prompt(n, n), max_new_tokens=14, block_length=5, threshold=0.5, rule="threshold"))
    gaps = 0
    while engine.active():
        rows = [*engine.scheduler.running, *engine.scheduler.waiting]
        wanted = []
        for one in rows:
            asked = masked(one.canvas, one.block_start, len(one.canvas))
            wanted.append(reference.ordered_logits(one.canvas, one.prompt_length)[asked])
            gaps += asked != list(range(asked[0], asked[-1] + 1))
        engine.step()
        torch.testing.assert_close(logits[-1], torch.cat(wanted), atol=1e-4, rtol=0)
    assert gaps


@pytest.mark.parametrize("block_length", [1, 5, 16])
@pytest.mark.parametrize(("rule", "number"), [one for one in RULES[::2] if one[0] != "joint_threshold"])
def test_tokens_are_those_of_the_plain_sampler(
    loaded: Loaded, reference: Reference, rule: str, number: float | tuple[float, float], block_length: int
) -> None:
    recipe = recipe_of(rule, number, block_length)
    expected = {n: reference.ordered_answer(prompt(n, n), recipe) for n in LENGTHS}
    assert engine_answers(loaded, recipe) == expected


def test_the_reference_is_worth_comparing_with(reference: Reference) -> None:
    recipe = Recipe(max_new_tokens=32, block_length=8, rule="entropy_threshold", number=0.4)
    worth_comparing([reference.ordered_answer(prompt(n, 6), recipe) for n in range(20)])


def test_one_token_at_a_time_in_a_window_of_one_is_an_autoregressive_model_fed_with_masks(
    loaded: Loaded, reference: Reference
) -> None:
    """Each token is read at a mask that sees exactly the text before it."""
    canvas = list(prompt(3, 3))
    for _ in range(6):
        length = len(canvas) + 1
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        canvas.append(opening(reference.logits([*canvas, checkpoints.MASK], list(range(length)), visible)[-1]))
    one = request("r", prompt(3, 3), max_new_tokens=6, block_length=1)
    tokens = run(loaded, [one])["r"].token_ids
    assert tokens == tuple(canvas[3 : 3 + len(tokens)])


def test_known_tokens_come_first_and_the_front_is_finished(wedlm: Loaded) -> None:
    one = row(wedlm, 6, max_new_tokens=9)
    first = one.span(1000)
    assert parts(first) == (0, 6, 0, 4, 10)
    assert first.targets == [Target(6 + n, 6 + n) for n in range(4)]
    one.receive(first, [20, None, 22, None])
    second = one.span(1000)
    assert parts(second) == (6, 0, 1, 3, 4)
    assert second.order == [6, 8, 7, 9]
    assert second.tokens == [20, 22, checkpoints.MASK, checkpoints.MASK]
    assert second.visible == [7, 8, 9, 10]
    assert second.targets == [Target(2, 7), Target(3, 9)]
    one.receive(second, [21, None])
    third = one.span(1000)  # 6 is finished, and the window reaches 10
    assert parts(third) == (7, 0, 2, 2, 4)
    assert third.order == [7, 8, 9, 10]
    assert (one.steps, one.forwards, one.positions) == (2, 2, 14)


def test_a_window_without_a_mask_is_joined_by_the_next_one(wedlm: Loaded) -> None:
    one = row(wedlm, 6, max_new_tokens=9)
    one.receive(one.span(1000), [20, 21, 22, 23])
    second = one.span(1000)
    assert parts(second) == (6, 0, 4, 4, 8)
    assert [target.position for target in second.targets] == [10, 11, 12, 13]
    one.receive(second, [24, 25, 26, 27])
    third = one.span(1000)  # the answer ends with position 14
    assert parts(third) == (10, 0, 4, 1, 5)
    one.receive(third, [28])
    assert one.state is State.FINISHED
    assert one.finished().token_ids == tuple(range(20, 29))
    assert one.most_positions == third.end == 15


def test_a_stop_token_ends_the_answer_once_nothing_before_it_is_open(wedlm: Loaded) -> None:
    one = row(wedlm, 3, max_new_tokens=9)
    one.receive(one.span(1000), [None, checkpoints.STOP, None, None])
    assert one.state is State.DENOISING
    one.receive(one.span(1000), [20, None, None])
    assert one.state is State.FINISHED
    assert (one.finished().token_ids, one.finished().finish_reason) == ((20,), "stop")


@pytest.mark.parametrize(("budget", "lengths"), [(1, [1] * 6 + [4]), (5, [5, 5]), (6, [6, 4]), (10, [10])])
def test_the_windows_first_step_comes_along_with_the_prompt_where_it_fits(
    wedlm: Loaded, budget: int, lengths: list[int]
) -> None:
    one = row(wedlm, 6, max_new_tokens=9)
    found = []
    while not one.steps:
        span = one.span(budget)
        found.append(len(span.tokens))
        one.receive(span, [20] * len(span.targets))
    assert found == lengths


@pytest.mark.parametrize("max_step_tokens", [1, 3, 8, 1000])
def test_tokens_do_not_hang_on_the_budget(wedlm: Loaded, max_step_tokens: int) -> None:
    prompts = [request(n, prompt(n, 10 + 7 * n), max_new_tokens=12, temperature=0.7, seed=n) for n in range(4)]
    found = run(wedlm, prompts, max_step_tokens=max_step_tokens)
    assert {n: one.token_ids for n, one in found.items()} == {
        n: one.token_ids for n, one in run(wedlm, prompts).items()
    }


def test_steps_are_spread_over_the_answer(wedlm: Loaded) -> None:
    """Seven steps for nine positions: two in each of the first two, then one."""
    one = row(wedlm, 3, max_new_tokens=9, denoise_steps=7)
    quotas = []
    while one.state is not State.FINISHED:
        span = one.span(1000)
        quotas.append(int(one.number()))
        one.receive(span, [20 if number < one.number() else None for number in range(len(span.targets))])
    assert quotas == [2, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"rule": "joint_threshold"}, "rule: 'joint_threshold' edits blocks"),
        ({"commit": "fused"}, "commit: family 'wedlm' commits no blocks"),
        ({"cache": "dual"}, "always uses its exact cache"),
    ],
)
def test_what_has_no_meaning_is_refused(wedlm: Loaded, params: dict[str, Any], named: str) -> None:
    with pytest.raises(BadPrompt, match=named) as caught:
        row(wedlm, 3, **params)
    assert caught.value.code == "bad_params"


def test_the_answer_may_end_with_the_context(wedlm: Loaded) -> None:
    finished = run(wedlm, [request("r", prompt(1, CONTEXT - 3), max_new_tokens=100)])["r"]
    assert finished.plan.max_new_tokens == 3
    with pytest.raises(BadPrompt, match=f"longest prompt: {CONTEXT - 1} tokens"):
        row(wedlm, CONTEXT)


def test_beginnings_are_shared(wedlm: Loaded) -> None:
    engine = engine_of(wedlm)
    for number in range(4):
        one = request(number, (*prompt(99, 3 * CHUNK), *prompt(number, 5)), max_new_tokens=8)
        engine.add(one)
        assert drain(engine)[number].token_ids == run(wedlm, [one], prefix_cache_mb=0)[number].token_ids
    assert engine.prefixes.reused == 2 * 3 * CHUNK


# By shapes alone: tencent/WeDLM-8B-Instruct is a Qwen3-8B, WeDLM-7B-Instruct a Qwen2.5-7B.
WEDLM: dict[str, Any] = {
    "architectures": ["WeDLMForCausalLM"],
    "model_type": "wedlm",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "eos_token_id": 151643,
}
WEDLM_8B = WEDLM | {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "qk_norm": True,
    "vocab_size": 151936,
}
WEDLM_7B = WEDLM | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "tensors", "parameters"),
    [(WEDLM_8B, 399, 8_190_735_360), (WEDLM_7B, 339, 15_231_233_024 // 2)],
)
def test_the_real_configurations_have_the_totals_of_what_they_were_made_from(
    config: dict[str, Any], tensors: int, parameters: int
) -> None:
    table = shapes(model_spec(config).decoder)
    assert len(table) == tensors
    assert sum(math.prod(shape) for shape in table.values()) == parameters


def test_switches_stand_in_the_config_and_the_rest_does_not() -> None:
    """The class's defaults, where a field is missing, are those of the 7B."""
    small, large = model_spec(WEDLM_7B), model_spec(WEDLM_8B)
    assert (small.decoder.qkv_bias, small.decoder.qk_norm) == (True, False)
    assert (large.decoder.qkv_bias, large.decoder.qk_norm) == (False, True)
    assert (large.attention, large.shift, large.mask_id, large.block_length) == ("causal", False, 151665, 16)
    assert large.stop_ids == {151643, 151645}
    assert model_spec(WEDLM_8B | {"mask_token_id": 151669}).mask_id == 151669


def test_the_recommended_rule_has_the_published_numbers(tmp_path: Path) -> None:
    spec = load(checkpoints.wedlm(tmp_path, tokenizer=False), "cpu", "float32").spec
    plan = admit(0, request("r", prompt(1, 3)), spec).plan
    assert (plan.rule, plan.number, plan.bound, plan.block_length) == ("entropy_threshold", 0.4, 0.02, 16)
