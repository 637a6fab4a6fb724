"""Sampling parameters as options of a command: declared by the fields alone."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from contract.flags import sampling_flags
from contract.sampling import SamplingParams

VALUES: dict[str, Any] = {
    "max_new_tokens": 7,
    "rule": "klass",
    "temperature": 0.5,
    "seed": 0,
    "cache": "dual",
    "kl_threshold": 0.25,
}


@pytest.fixture
def given() -> dict[str, Any]:
    return {}


@pytest.fixture
def app(given: dict[str, Any]) -> typer.Typer:
    made = typer.Typer()

    @made.command()
    @sampling_flags("timeout_s")
    def command(word: str, before: int = 1, *, sampling: dict[str, Any], after: int = 2) -> None:
        """Do it."""
        given.update(sampling, word=word, before=before, after=after)

    return made


def test_a_command_gets_the_values_that_were_given(app: typer.Typer, given: dict[str, Any]) -> None:
    words = [word for name, value in VALUES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["it", *words, "--after", "3"])
    assert result.exit_code == 0, result.output
    assert given == {**VALUES, "word": "it", "before": 1, "after": 3}


def test_there_is_an_option_for_each_field_in_its_place_but_for_those_left_out(app: typer.Typer) -> None:
    names = [parameter.name for parameter in typer.main.get_command(app).params]
    fields = [name for name in SamplingParams.model_fields if name != "timeout_s"]
    start = names.index("before") + 1
    assert names[start : start + len(fields) + 1] == [*fields, "after"]


def test_a_word_where_a_number_belongs_is_wrong_usage(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["it", "--top-k", "some"])
    assert result.exit_code == 2
