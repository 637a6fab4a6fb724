"""What an output row says about its parameters gives the same text when it is sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from contract.sampling import RULE_OF, Rule, parse_params
from tests.canvas_checkpoint import diffusion_gemma
from tests.checkpoints import llada, wedlm
from worker.engine import AnyLoaded, Finished, Request, engine_of, load
from worker.model import applied_params


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> AnyLoaded:
    return load(llada(tmp_path_factory.mktemp("model"), tokenizer=False), "cpu", "float32")


def answer(loaded: AnyLoaded, params: dict[str, Any]) -> Finished:
    engine = engine_of(loaded)
    engine.add(Request("r", (1, 2, 3), parse_params(params)))
    while not (finished := engine.step()):
        pass
    return finished[0]


@pytest.fixture(scope="module")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> AnyLoaded:
    return load(diffusion_gemma(tmp_path_factory.mktemp("canvas"), tokenizer=False), "cpu", "float32")


@pytest.mark.parametrize("rule", get_args(Rule))
def test_sent_again_they_give_the_same_plan(loaded: AnyLoaded, rule: Rule) -> None:
    own = {name: 1 for name, its in RULE_OF.items() if its == rule}
    for params in ({"rule": rule}, {"rule": rule, **own}):
        first = answer(loaded, {**params, "max_new_tokens": 6, "seed": 4})
        again = answer(loaded, applied_params(first))
        assert (again.plan, again.token_ids) == (first.plan, first.token_ids)
        assert {**own, "rule": rule}.keys() <= applied_params(first).keys()


def test_a_causal_row_names_neither_cache_nor_commit(tmp_path: Path) -> None:
    loaded = load(wedlm(tmp_path, tokenizer=False), "cpu", "float32")
    first = answer(loaded, {"max_new_tokens": 6, "seed": 4})
    again = answer(loaded, applied_params(first))
    assert (again.plan, again.token_ids) == (first.plan, first.token_ids)


@pytest.mark.parametrize("params", [{}, {"denoise_steps": 3}, {"entropy_bound": 0.4, "temperature": 0.5}], ids=str)
def test_sent_again_they_give_the_same_canvases(canvas: AnyLoaded, params: dict[str, Any]) -> None:
    first = answer(canvas, {**params, "max_new_tokens": 30, "seed": 4})
    applied = applied_params(first)
    again = answer(canvas, applied)
    assert (again.plan, again.token_ids) == (first.plan, first.token_ids)
    assert params.items() <= applied.items()
