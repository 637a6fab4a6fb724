"""Values of several rounds, for the benchmarks of both sides: their median, and those that stand out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

LEAST_FOR_QUARTILES = 4


def outliers(values: Sequence[float]) -> list[int]:
    """Indices of values beyond 1.5 interquartile ranges from the quartiles (Tukey, 1977); none below four values."""
    if len(values) < LEAST_FOR_QUARTILES:
        return []
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = 1.5 * (high - low)
    return [at for at, value in enumerate(values) if not low - reach <= value <= high + reach]


def summary(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Median, extremes, every value, and which rounds (from 0) are outliers. Outliers count in the median."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "rounds": [round(value, digits) for value in values],
        "outliers": outliers(values),
    }
