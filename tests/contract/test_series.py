"""Values of several rounds: the median, and which stand out."""

from __future__ import annotations

from contract import series


def test_outliers_are_marked_and_kept() -> None:
    assert series.outliers([10.0, 10.2, 9.9, 10.1, 3.0]) == [4]
    assert series.outliers([10.0, 3.0, 10.0]) == []
    found = series.summary([10.0, 10.2, 9.9, 10.1, 3.0])
    assert (found["median"], found["min"], found["max"], found["outliers"]) == (10.0, 3.0, 10.2, [4])
    assert found["rounds"] == [10.0, 10.2, 9.9, 10.1, 3.0]


def test_equal_rounds_have_no_outliers_and_one_round_is_its_own_median() -> None:
    assert series.summary([7.0] * 5)["outliers"] == []
    assert series.summary([7.0]) == {"median": 7.0, "min": 7.0, "max": 7.0, "rounds": [7.0], "outliers": []}
