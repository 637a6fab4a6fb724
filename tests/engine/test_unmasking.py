"""Each rule on confidences made by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.sampling import Rule
from worker.engine.unmasking import RULES
from worker.engine.unmasking.fixed_steps import quota


def accepted(
    rule: Rule, number: float, confidences: list[float], entropies: list[float] | None = None, padding: int = 0
) -> list[int]:
    """Indices that `rule` accepts in one row, which stands between two others to see that rows stay apart."""
    width = len(confidences) + padding
    entropies = entropies or [1 - c for c in confidences]
    confidence = torch.tensor([[0.5] * width, confidences + [-torch.inf] * padding, [0.99] * width])
    entropy = torch.tensor([[0.5] * width, entropies + [torch.inf] * padding, [0.01] * width])
    valid = torch.tensor([[True] * width, [True] * len(confidences) + [False] * padding, [True] * width])
    numbers = torch.tensor([[number], [number], [number]])
    out = RULES[rule].accept(confidence, entropy, valid, numbers)
    assert out.dtype == torch.bool
    assert out.any(-1).all()
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


def test_only_the_entropy_bound_asks_for_entropies() -> None:
    assert {name for name, rule in RULES.items() if rule.needs_entropy} == {"entropy_bound"}
