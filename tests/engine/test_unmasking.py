"""Each rule on confidences made by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.sampling import Rule
from worker.engine.history import History
from worker.engine.unmasking import RULES
from worker.engine.unmasking.fixed_steps import quota
from worker.engine.unmasking.rule import Candidates


def accepted(
    rule: Rule,
    number: float,
    confidences: list[float],
    entropies: list[float] | None = None,
    padding: int = 0,
    divergences: list[float] | None = None,
    bound: float = 0.0,
    placed: list[int] | None = None,
    differs: list[int] | None = None,
    distances: list[int] | None = None,
) -> list[int]:
    """Indices that `rule` accepts in one row, which stands between two others to see that rows stay apart."""
    width = len(confidences) + padding
    entropies = entropies or [1 - c for c in confidences]
    divergences = divergences or [0.0] * len(confidences)
    placed, differs = placed or [0] * len(confidences), differs or [1] * len(confidences)
    distances = distances or list(range(len(confidences)))
    seen = Candidates(
        confidence=torch.tensor([[0.5] * width, confidences + [-torch.inf] * padding, [0.99] * width]),
        valid=torch.tensor([[True] * width, [True] * len(confidences) + [False] * padding, [True] * width]),
        number=torch.tensor([[number], [number], [number]]),
        bound=torch.tensor([[bound], [bound], [bound]]),
        entropy=torch.tensor([[0.5] * width, entropies + [torch.inf] * padding, [0.01] * width]),
        divergence=torch.tensor([[0.0] * width, divergences + [torch.inf] * padding, [torch.inf] * width]),
        distance=torch.tensor([[0] * width, distances + [0] * padding, [0] * width]).float(),
        placed=torch.tensor([[0] * width, placed + [0] * padding, [0] * width]).bool(),
        differs=torch.tensor([[1] * width, differs + [1] * padding, [1] * width]).bool(),
    )
    out = RULES[rule].accept(seen)
    assert out.dtype == torch.bool
    assert out[[0, 2]].any(-1).all()
    return out[1].nonzero().flatten().tolist()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("rule", "number", "confidences", "expected"),
    [
        ("threshold", 0.9, [0.95, 0.2, 0.9, 0.89], [0, 2]),
        ("threshold", 0.9, [0.3, 0.5, 0.4], [1]),  # none reaches it: the best
        ("threshold", 1.0, [0.3, 1.0, 1.0], [1, 2]),
        ("left_to_right", 0.9, [0.2, 0.95, 0.91, 0.5, 0.99], [0, 1, 2]),
        ("left_to_right", 0.9, [0.95, 0.2, 0.99], [0]),
        ("left_to_right", 0.9, [0.1], [0]),
        ("factor", 1.0, [0.4, 0.7, 0.5], [1]),  # bounds 1/2, 2/3, 3/4
        ("factor", 1.0, [0.4, 0.7, 0.67], [1, 2]),
        ("factor", 1.0, [0.75, 0.9, 0.8], [0, 1, 2]),
        ("factor", 1.0, [0.4, 0.3], [0]),  # none reaches the first bound: the best
        ("factor", 0.5, [0.8, 0.75], [0]),  # bounds 3/4, 5/6
        ("factor", 9.0, [0.1, 0.2, 0.3], [0, 1, 2]),  # all bounds below nothing; padding still stays out
        ("factor", 1.0, [0.7, 0.7, 0.2], [0, 1]),
        ("fixed_steps", 2, [0.1, 0.7, 0.3, 0.8], [1, 3]),
        ("fixed_steps", 0, [0.1, 0.7, 0.3], [1]),  # a quota of nothing still decides one
        ("fixed_steps", 9, [0.1, 0.7, 0.3], [0, 1, 2]),
        ("fixed_steps", 1, [0.5, 0.5, 0.5], [0]),  # ties go to the left
        ("fixed_steps", 2, [0.1, 0.5, 0.5, 0.5], [1, 2]),
    ],
)
def test_confidence_rules_accept(
    rule: Rule, number: float, confidences: list[float], expected: list[int], padding: int
) -> None:
    assert accepted(rule, number, confidences, padding=padding) == expected


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("bound", "entropies", "expected"),
    [
        (0.1, [0.5, 0.04, 0.05, 2.0], [0, 1, 2]),  # 0.04 + 0.05 + 0.5 less the largest is 0.09
        (0.08, [0.5, 0.04, 0.05, 2.0], [1, 2]),
        (0.0, [0.5, 0.04, 0.05, 2.0], [1]),
        (0.0, [0.3, 0.0, 0.0], [0, 1, 2]),  # certain positions cost nothing
        (9.9, [3.0, 3.0, 3.0, 3.0], [0, 1, 2, 3]),
        (5.9, [3.0, 3.0, 3.0, 3.0], [0, 1]),
        (0.1, [4.0], [0]),
    ],
)
def test_entropy_bound_accepts(bound: float, entropies: list[float], expected: list[int], padding: int) -> None:
    assert accepted("entropy_bound", bound, [0.5] * len(entropies), entropies, padding) == expected


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("confidences", "divergences", "expected"),
    [
        ([0.95, 0.93, 0.91], [0.005, 0.02, 0.0], [0, 2]),
        ([0.95, 0.93, 0.9], [0.01, 0.02, 0.0], [0]),  # neither bound is met where it is only reached: the best
        ([0.99, 0.95], [0.5, 0.0], [1]),  # the best one is only for want of others
        ([0.2, 0.99, 0.98], [0.0, torch.inf, torch.inf], [1]),  # a block's first step: nothing to compare with
    ],
)
def test_klass_accepts_what_is_sure_and_steady(
    confidences: list[float], divergences: list[float], expected: list[int], padding: int
) -> None:
    assert accepted("klass", 0.9, confidences, None, padding, divergences, bound=0.01) == expected


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("confidences", "placed", "differs", "expected"),
    [
        ([0.6, 0.4, 0.51], [0, 0, 0], [1, 1, 1], [0, 2]),
        ([0.3, 0.5, 0.2], [0, 0, 0], [1, 1, 1], [1]),  # 0.5 is only reached: the best
        ([0.6, 0.95, 0.95, 0.9], [0, 1, 1, 1], [1, 1, 0, 1], [0, 1]),  # the same again is no edit, nor is 0.9 enough
        ([0.99, 0.3, 0.2], [1, 0, 0], [0, 1, 1], [1]),  # the best of the masks, not of all
        ([0.99, 0.3, 0.2], [1, 0, 0], [1, 1, 1], [0, 1]),  # an edit does not stand for a mask
        ([0.99, 0.8], [1, 1], [0, 1], []),  # no mask is left and nothing changes: the block's end
    ],
)
def test_joint_threshold_fills_and_edits(
    confidences: list[float], placed: list[int], differs: list[int], expected: list[int], padding: int
) -> None:
    taken = accepted("joint_threshold", 0.5, confidences, None, padding, None, 0.9, placed, differs)
    assert taken == expected


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("entropies", "distances", "expected"),
    [
        ([0.3, 0.5, 1.2, 0.2, 2.0], [0, 1, 3, 5, 7], [0, 3]),
        ([0.35, 0.36, 0.37, 0.38], [0, 1, 2, 3], [0, 1]),  # 0.37 + 2 · 0.02 is more than 0.4
        ([0.39, 0.1, 0.1], [0, 16, 14], [0, 2]),
        ([0.9, 0.85, 0.84], [0, 1, 4], [1]),  # none is below: the least of 0.9, 0.87, 0.92
    ],
)
def test_entropy_threshold_charges_for_distance(
    entropies: list[float], distances: list[int], expected: list[int], padding: int
) -> None:
    sure = [0.5] * len(entropies)
    assert accepted("entropy_threshold", 0.4, sure, entropies, padding, bound=0.02, distances=distances) == expected


def test_history_tells_the_larger_of_the_last_two_moves() -> None:
    """By hand: KL((3/4, 1/4) from (1/2, 1/2)) = 0.1308, and of staying where one is 0."""
    even, uneven = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    history = History()

    def moved(key: int, positions: list[int], *log_p: Tensor) -> list[float]:
        return history.divergence(key, positions, torch.stack(log_p)).tolist()

    assert moved(1, [7, 8, 9], even, even, even) == [torch.inf] * 3
    assert moved(2, [7], uneven) == [torch.inf]  # a neighbour at the same place
    assert moved(1, [7, 8, 9], uneven, even, even) == [torch.inf] * 3  # one move seen, two are asked for
    assert moved(1, [7, 9], uneven, even) == pytest.approx([0.1308, 0.0], abs=1e-4)
    assert moved(1, [7, 9], uneven, uneven) == pytest.approx([0.0, 0.1308], abs=1e-4)
    assert moved(1, [9, 10], uneven, even) == pytest.approx([0.1308, torch.inf], abs=1e-4)  # a window that moved
    assert moved(1, [11], even) == [torch.inf]  # the next block
    history.release(1)
    history.release(2)
    assert len(history) == 0


def test_what_has_no_probability_does_not_move() -> None:
    history = History()
    certain = torch.tensor([[0.0, -torch.inf]])
    for _ in range(3):
        last = history.divergence(0, [0], certain)
    assert last.tolist() == [0.0]


def test_entropy_bound_ignores_confidence() -> None:
    """The most confident position need not be the one of least entropy; taking it as well would break the bound."""
    assert accepted("entropy_bound", 0.1, [0.90, 0.85], [0.60, 0.42]) == [1]


@settings(derandomize=True, deadline=None, database=None)
@given(
    rule=st.sampled_from(sorted(RULES)),
    number=st.floats(0, 1),
    confidences=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=9),
    padding=st.integers(0, 4),
)
def test_every_step_decides_something_and_nothing_beyond_the_row(
    rule: Rule, number: float, confidences: list[float], padding: int
) -> None:
    taken = accepted(rule, number, confidences, padding=padding)
    assert taken
    assert max(taken) < len(confidences)


@settings(derandomize=True, deadline=None, database=None)
@given(masks=st.integers(0, 200), steps=st.integers(1, 250))
def test_quotas_sum_to_the_masks_and_differ_by_one_at_most(masks: int, steps: int) -> None:
    quotas = [quota(masks, steps, step) for step in range(steps)]
    assert sum(quotas) == masks
    assert max(quotas) - min(quotas) <= 1
    assert quotas == sorted(quotas, reverse=True)


def test_quota_by_hand() -> None:
    assert [quota(32, 5, step) for step in range(5)] == [7, 7, 6, 6, 6]


def test_rules_ask_only_for_what_they_use() -> None:
    assert {name for name, rule in RULES.items() if rule.needs_history} == {"klass"}
    assert {name for name, rule in RULES.items() if rule.edits} == {"joint_threshold"}
    assert {name for name, rule in RULES.items() if rule.needs_entropy} == {"entropy_bound", "entropy_threshold"}
    assert {name for name, rule in RULES.items() if rule.needs_distance} == {"entropy_threshold"}
