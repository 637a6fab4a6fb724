"""Predictions equal torch's on whole rows of logits; random draws follow the distribution and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from worker.engine.models.linear import Head
from worker.engine.sampling import SAMPLED_AT_ONCE, Draw, Prediction, predict, uniform

WIDTH = 16


def tensors(vocabulary: int, positions: int = 9, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    """Hidden states (N, d) and a head (V, d)."""
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(positions, WIDTH, generator=generator)
    return hidden, torch.randn(vocabulary, WIDTH, generator=generator) * scale / WIDTH**0.5


def whole(hidden: Tensor, head: Tensor, mask_id: int) -> Tensor:
    """Logits (N, V) in float64, the mask forbidden."""
    logits = hidden.double() @ head.double().T
    logits[:, mask_id] = -torch.inf
    return logits


def drawn(
    hidden: Tensor,
    head: Tensor,
    u: Tensor,
    *,
    mask_id: int = 3,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Prediction:
    """Every position drawn with the same parameters, the uniform numbers being `u`."""
    n = hidden.shape[0]
    draw = Draw(
        index=torch.arange(n),
        temperature=torch.full((n,), temperature),
        top_p=torch.full((n,), top_p),
        top_k=torch.full((n,), top_k),
        uniform=u,
    )
    return predict(hidden, Head(head), mask_id, want_entropy=False, draw=draw)


@pytest.mark.parametrize("vocabulary", [5, 7, 8, 13, 64, 259])
@pytest.mark.parametrize("size", [3, 7, 8, 64])
def test_greedy_equals_torch_whatever_the_slices(vocabulary: int, size: int) -> None:
    """Slices that divide the vocabulary, that leave one entry over, and one slice larger than all of it."""
    hidden, head = tensors(vocabulary)
    for mask_id in (0, 2, vocabulary - 1):
        got = predict(hidden, Head(head, size), mask_id, want_entropy=True, draw=None)
        p = whole(hidden, head, mask_id).softmax(-1)
        assert got.x0.tolist() == p.argmax(-1).tolist()
        torch.testing.assert_close(got.confidence.double(), p.amax(-1), atol=1e-6, rtol=0)
        assert got.entropy is not None
        expected = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(got.entropy.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [3, 8, 64])
def test_a_head_may_have_a_bias(size: int) -> None:
    hidden, head = tensors(13)
    bias = torch.linspace(-2, 2, 13)
    expected = hidden.double() @ head.double().T + bias
    torch.testing.assert_close(Head(head, size, bias)(hidden).double(), expected, atol=1e-5, rtol=0)


def test_entropy_is_left_out_unless_asked_for() -> None:
    hidden, head = tensors(8)
    assert predict(hidden, Head(head), mask_id=0, want_entropy=False, draw=None).entropy is None


def test_sure_predictions_have_confidence_one_and_no_entropy() -> None:
    hidden, head = tensors(20, scale=500.0)
    got = predict(hidden, Head(head), mask_id=0, want_entropy=True, draw=None)
    assert got.entropy is not None
    assert got.confidence.tolist() == pytest.approx([1.0] * 9)
    assert got.entropy.tolist() == pytest.approx([0.0] * 9, abs=1e-5)


def test_draws_follow_the_tempered_distribution() -> None:
    count, vocabulary, temperature = 20_000, 12, 0.7
    hidden, head = tensors(vocabulary, positions=1)
    steps = torch.arange(count)
    u = uniform(torch.full((count,), 42), steps, torch.full((count,), 7))
    got = drawn(hidden.expand(count, -1), head, u, temperature=temperature)
    p = (whole(hidden, head, 3) / temperature).softmax(-1)[0]
    seen = torch.bincount(got.x0, minlength=vocabulary).double()
    assert seen[3] == 0
    allowed = p > 0
    statistic = ((seen - count * p)[allowed] ** 2 / (count * p)[allowed]).sum()
    assert statistic < 31.3  # the 0.1% point of chi-square with 11 - 1 degrees of freedom is 29.6


def test_confidence_of_a_draw_is_its_probability_at_temperature_one() -> None:
    hidden, head = tensors(30, positions=200)
    u = uniform(torch.zeros(200, dtype=torch.int64), torch.arange(200), torch.arange(200))
    got = drawn(hidden, head, u, temperature=3.0)
    p = whole(hidden, head, 3).softmax(-1).gather(-1, got.x0[:, None])[:, 0]
    torch.testing.assert_close(got.confidence.double(), p, atol=1e-6, rtol=0)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_top_k_draws_only_from_the_k_best(top_k: int) -> None:
    hidden, head = tensors(30, positions=1)
    count = 3000
    got = drawn(hidden.expand(count, -1), head, torch.linspace(0, 1 - 2**-24, count), temperature=5.0, top_k=top_k)
    best = whole(hidden, head, 3)[0].argsort(descending=True)[:top_k]
    assert set(got.x0.tolist()) == set(best.tolist())


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.6, 0.95])
def test_top_p_draws_from_the_smallest_set_that_reaches_it(top_p: float) -> None:
    hidden, head = tensors(30, positions=1)
    count = 20_000
    got = drawn(hidden.expand(count, -1), head, torch.linspace(0, 1 - 2**-24, count), top_p=top_p)
    p, order = whole(hidden, head, 3).softmax(-1)[0].sort(descending=True)
    wanted = int((p.cumsum(-1) < top_p).sum()) + 1
    assert set(got.x0.tolist()) == set(order[:wanted].tolist())


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_draw_an_allowed_token(u: float) -> None:
    hidden, head = tensors(259, positions=50)
    got = drawn(hidden, head, torch.full((50,), u), temperature=10.0)
    assert 3 not in got.x0.tolist()
    best = whole(hidden, head, 3).argmax(-1)
    assert (got.x0 == best).all() if u == 0.0 else (got.x0 != best).all()


def test_only_the_positions_of_the_draw_are_drawn() -> None:
    hidden, head = tensors(30)
    greedy = predict(hidden, Head(head), 3, want_entropy=False, draw=None)
    draw = Draw(
        index=torch.tensor([2, 5]),
        temperature=torch.tensor([10.0, 10.0]),
        top_p=torch.ones(2),
        top_k=torch.zeros(2, dtype=torch.int64),
        uniform=torch.tensor([0.99, 0.99]),
    )
    got = predict(hidden, Head(head), 3, want_entropy=False, draw=draw)
    differs = (got.x0 != greedy.x0).nonzero().flatten().tolist()
    assert differs == [2, 5]


def test_more_draws_than_fit_at_once_are_all_made() -> None:
    count = 2 * SAMPLED_AT_ONCE + 5
    hidden, head = tensors(30, positions=count)
    u = torch.linspace(0, 0.99, count)
    one_by_one = [drawn(hidden[i : i + 1], head, u[i : i + 1], temperature=4.0).x0.item() for i in range(count)]
    assert drawn(hidden, head, u, temperature=4.0).x0.tolist() == one_by_one


def test_random_numbers_depend_on_seed_step_and_position_alone() -> None:
    seeds, steps, positions = (torch.tensor(values) for values in ([1, 1, 2, 1], [5, 6, 5, 5], [9, 9, 9, 10]))
    together = uniform(seeds, steps, positions)
    one_by_one = [uniform(seeds[i : i + 1], steps[i : i + 1], positions[i : i + 1]).item() for i in range(4)]
    assert together.tolist() == one_by_one
    assert len(set(one_by_one)) == 4


def test_random_numbers_are_uniform_along_every_axis() -> None:
    count = 20_000
    zero, running = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    for numbers in (uniform(running, zero, zero), uniform(zero, running, zero), uniform(zero, zero, running)):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        seen = torch.histc(numbers, bins=20, min=0, max=1)
        assert ((seen - count / 20) ** 2 / (count / 20)).sum() < 43.8  # 0.1% point, 19 degrees of freedom
        after = numbers[1:] - 0.5
        assert abs((after * (numbers[:-1] - 0.5)).mean() * 12) < 0.03  # no serial correlation


def test_the_largest_seed_is_taken() -> None:
    largest = torch.tensor([2**63 - 1])
    assert 0 <= uniform(largest, torch.tensor([10**6]), torch.tensor([10**6])).item() < 1
