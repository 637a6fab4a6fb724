"""Row indices as text, and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from contract.ranges import by_batch, holds, written


@given(st.sets(st.integers(0, 60)))
def test_a_text_holds_the_indices_it_was_written_for_and_no_others(indices: set[int]) -> None:
    text = written(indices)
    assert {index for index in range(62) if holds(text, index)} == indices


def test_neighbours_are_ranges_and_batches_apart() -> None:
    assert written([3, 1, 2, 7, 2]) == "1-3,7"
    assert by_batch([("a", 0), ("b", 5), ("a", 1)]) == {"a": "0-1", "b": "5"}
    assert not holds("what", 1)
    assert not holds("", 0)
