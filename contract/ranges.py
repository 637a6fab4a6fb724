"""Row indices as short text, such as `0-31,40`: how log lines name many rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable


def written(indices: Iterable[int]) -> str:
    """The indices in rising order, each once, neighbours as ranges; '' for none."""
    ends: list[list[int]] = []
    for index in sorted(set(indices)):
        if ends and index == ends[-1][1] + 1:
            ends[-1][1] = index
        else:
            ends.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def holds(text: str, index: int) -> bool:
    """Is `index` among those of `text`? What is no range of numbers holds nothing."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if first.isdecimal() and (not dash or last.isdecimal()) and int(first) <= index <= int(last or first):
            return True
    return False


def by_batch(rows: Iterable[tuple[str, int]]) -> dict[str, str]:
    """The rows of several batches, for the field `indices` of a log line."""
    found: dict[str, list[int]] = {}
    for batch, index in rows:
        found.setdefault(batch, []).append(index)
    return {batch: written(indices) for batch, indices in found.items()}
