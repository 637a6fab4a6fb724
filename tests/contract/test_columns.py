"""Templates: a text with fields becomes a prompt, or says what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from contract.columns import Columns
from contract.errors import BadPrompt


def filled(template: str, **row: Any) -> str:
    return Columns(template=template).fill(row)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{q}", "why?"),
        ("Q: {q}\nA:", "Q: why?\nA:"),
        ("{ q }{q}", "why?why?"),
        ('{{"q": "{q}"}}', '{"q": "why?"}'),
        ("{{q}}", "{q}"),
        ("no field", "no field"),
        ("{n} {yes} {list}", '3 true ["ü"]'),
        ("{two words}", "2"),
    ],
)
def test_fields_are_filled_in_and_doubled_braces_are_braces(template: str, prompt: str) -> None:
    assert filled(template, q="why?", n=3, yes=True, list=["ü"], **{"two words": "2"}) == prompt


def test_values_are_not_templates_themselves() -> None:
    assert filled("{q}", q="{x} }}") == "{x} }}"


@pytest.mark.parametrize("row", [{}, {"q": None}])
def test_a_field_without_a_value_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(BadPrompt, match="the template's field 'q' is missing") as caught:
        filled("{q}", **row)
    assert caught.value.code == "bad_row"


@pytest.mark.parametrize("template", ["a\n{", "a\n}", "a\n{x", "a\n{}", "a\n{{{"])
def test_a_single_brace_is_refused_with_its_line(template: str) -> None:
    with pytest.raises(ValueError, match=r"single '[{}]' on line 2"):
        Columns(template=template)


def test_the_fields_of_a_template_are_needed_columns() -> None:
    assert Columns(template="{b} {a} {b}", id="key").needed == ("key", "b", "a")
