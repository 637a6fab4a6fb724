"""Sampling parameters are checked once, and a mistake is named together with what was probably meant."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contract.errors import BadPrompt
from contract.sampling import ALIASES, RULE_OF, SamplingParams, parse_params


def fault(values: dict[str, Any], base: SamplingParams | None = None) -> str:
    with pytest.raises(BadPrompt) as caught:
        parse_params(values, base)
    assert caught.value.code == "bad_params"
    return str(caught.value)


@pytest.mark.parametrize(("theirs", "ours"), ALIASES.items())
def test_names_of_other_systems_are_understood(theirs: str, ours: str) -> None:
    assert getattr(parse_params({theirs: 12}), ours) == 12


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_new_token", "max_new_tokens"), ("blocklength", "block_length")],
)
def test_an_unknown_parameter_is_named_with_the_nearest_known(name: str, meant: str) -> None:
    assert fault({name: 1}) == f"unknown parameter '{name}' (did you mean '{meant}'?)"


@pytest.mark.parametrize(
    ("given", "stop"), [("end", ("end",)), (["a", "\n"], ("a", "\n")), ([], ()), ("", ()), (None, ())]
)
def test_stop_is_a_text_or_up_to_four(given: Any, stop: tuple[str, ...]) -> None:
    assert parse_params({"stop": given}).stop == stop


@pytest.mark.parametrize("given", [5, True, [""], ["a", 1], ["a"] * 5, {"a": 1}])
def test_what_is_no_stop_text_is_refused(given: Any) -> None:
    assert fault({"stop": given}) == "stop: a text, or a list of at most 4 texts that are not empty"


def test_a_name_like_no_other_is_named_alone() -> None:
    assert fault({"zzz": 1}) == "unknown parameter 'zzz'"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "many"),
        ("max_new_tokens", [3]),
        ("denoise_steps", 0),
        ("threshold", 0.0),
        ("threshold", 1.1),
        ("entropy_bound", -0.1),
        ("entropy_threshold", 0),
        ("factor", 0),
        ("factor", "much"),
        ("kl_threshold", 0),
        ("edit_threshold", 0),
        ("edit_threshold", 1.1),
        ("kl_threshold", float("nan")),
        ("block_length", 4097),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("rule", "fastest"),
        ("rule", []),
        ("cache", "all"),
    ],
)
def test_a_value_out_of_range_names_the_parameter(name: str, value: Any) -> None:
    assert fault({name: value}).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "seed", *RULE_OF])
def test_true_is_not_a_number(name: str) -> None:
    assert fault({name: True}) == f"{name} must be a number, not true"


def test_the_limits_themselves_are_allowed() -> None:
    limits = {"threshold": 1.0, "top_p": 1.0, "top_k": 0, "temperature": 0, "seed": 2**63 - 1, "entropy_bound": 0}
    assert parse_params(limits).model_dump(exclude_unset=True) == limits


def test_null_means_not_given() -> None:
    base = SamplingParams(temperature=0.5)
    assert parse_params({"temperature": None, "unheard_of": None}, base) == base


def test_a_row_is_laid_over_what_it_inherits() -> None:
    base = SamplingParams(temperature=0.5, seed=1)
    params = parse_params({"temperature": 0.0, "max_tokens": 8}, base)
    assert params == SamplingParams(temperature=0.0, seed=1, max_new_tokens=8)
    assert base.temperature == 0.5


def test_a_nearer_rule_drops_inherited_steps() -> None:
    params = parse_params({"rule": "threshold"}, SamplingParams(denoise_steps=8))
    assert (params.rule, params.denoise_steps) == ("threshold", None)
    kept = parse_params({"temperature": 1}, SamplingParams(denoise_steps=8))
    assert kept.denoise_steps == 8


@pytest.mark.parametrize("name", ["denoise_steps", "steps"])
def test_nearer_steps_drop_an_inherited_rule(name: str) -> None:
    params = parse_params({name: 8}, SamplingParams(rule="threshold", threshold=0.9))
    assert (params.rule, params.denoise_steps, params.threshold) == (None, 8, 0.9)
    assert params.resolved_rule("threshold") == "fixed_steps"


def test_steps_with_another_rule_in_one_place_contradict_each_other() -> None:
    assert "denoise_steps belongs to rule 'fixed_steps', not 'threshold'" in fault({"steps": 8, "rule": "threshold"})
    assert parse_params({"steps": 8, "rule": "fixed_steps"}).denoise_steps == 8


@pytest.mark.parametrize(("name", "rule"), RULE_OF.items())
def test_a_parameter_of_one_rule_selects_it(name: str, rule: str) -> None:
    assert parse_params({name: 1}).resolved_rule("left_to_right") == rule
    assert parse_params({name: 1, "rule": rule}).rule == rule
    assert fault({name: 1, "rule": "threshold"}) == (
        f"{name} belongs to rule '{rule}', not 'threshold': drop one of the two"
    )


def test_parameters_of_two_rules_contradict_each_other() -> None:
    assert fault({"factor": 1, "steps": 8}) == "denoise_steps and factor belong to different rules: drop all but one"


def test_a_nearer_rule_drops_what_belongs_to_an_inherited_one() -> None:
    base = SamplingParams(rule="factor", factor=0.5, threshold=0.8)
    assert parse_params({"rule": "threshold"}, base) == SamplingParams(rule="threshold", threshold=0.8)
    assert parse_params({"denoise_steps": 4}, base) == SamplingParams(denoise_steps=4, threshold=0.8)
    assert parse_params({"kl_threshold": 0.1}, base) == SamplingParams(kl_threshold=0.1, threshold=0.8)
    assert parse_params({"rule": "factor"}, base) == base
    assert parse_params({"factor": 2}, base).resolved_rule("threshold") == "factor"


def test_the_rule_is_the_named_one_else_that_of_the_steps_else_the_models() -> None:
    assert SamplingParams(rule="left_to_right").resolved_rule("threshold") == "left_to_right"
    assert SamplingParams(denoise_steps=2).resolved_rule("threshold") == "fixed_steps"
    assert SamplingParams().resolved_rule("threshold") == "threshold"


@pytest.mark.parametrize("wrong", [0, -1, "soon", True, float("inf")])
def test_a_deadline_is_a_positive_number_of_seconds(wrong: object) -> None:
    assert parse_params({"timeout_s": 2.5}).timeout_s == 2.5
    assert parse_params({}, SamplingParams(timeout_s=60)).timeout_s == 60
    assert "timeout_s" in fault({"timeout_s": wrong})


def test_parameters_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().seed = 1  # type: ignore[misc]
