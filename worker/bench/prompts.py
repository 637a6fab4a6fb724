"""Prompt sets: a name under `sets/`, or a file, to requests that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import Any, TypeVar

from contract.errors import UsageError, nearest
from contract.jobs import Message
from contract.sampling import parse_params
from worker.engine import Request
from worker.model import Model

SHIPPED = Path(__file__).parent / "sets"
GOLDEN = 0.6180339887498949
T = TypeVar("T")


def read_set(name: str, model: Model) -> list[Request]:
    """The set's rows as requests, in its order. Raises UsageError for a set that is missing or unreadable."""
    file = _find(name)
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        requests = [_request(row, model) for row in rows]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{file} is not a prompt set (id, prompt or messages, max_new_tokens): {error}") from None
    if not requests:
        raise UsageError(f"{file} holds no prompts")
    return requests


def _find(name: str) -> Path:
    for file in (SHIPPED / f"{name}.jsonl", Path(name)):
        if file.is_file():
            return file
    known = sorted(file.stem for file in SHIPPED.glob("*.jsonl"))
    raise UsageError(f"no prompt set '{name}'{nearest(name, known)}; shipped are: {', '.join(known) or 'none'}")


def _request(row: dict[str, Any], model: Model) -> Request:
    turns = row.get("messages")
    prompt = row["prompt"] if turns is None else tuple(Message(**turn) for turn in turns)
    return model.request(row["id"], prompt, parse_params({"max_new_tokens": row["max_new_tokens"]}))


def strided(items: Sequence[T], count: int | None) -> list[T]:
    """`count` of the items at even distances, in their order; all of them for None or when there are fewer."""
    if count is None or count >= len(items):
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]


def spread(items: Sequence[T]) -> list[T]:
    """All items, ordered so that any first few lie evenly over the whole: steps near the golden ratio around it."""
    count = len(items)
    stride = max(1, round(GOLDEN * count))
    while gcd(stride, count) > 1:
        stride += 1
    return [items[number * stride % count] for number in range(count)]
