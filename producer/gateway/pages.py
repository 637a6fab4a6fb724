"""Lists in OpenAI's form, a page at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import Query

from producer.gateway.errors import bad_request

After = Annotated[str | None, Query(max_length=300, description="id of the last one of the page before")]


def page(documents: Iterable[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """At most `limit` of `documents`, those behind the one called `after`. Raises ApiError where there is none."""
    left = iter(documents)
    if after is not None and not any(one["id"] == after for one in left):
        raise bad_request(f"after: there is no '{after[:100]}' in this list", "after")
    found = list(itertools.islice(left, limit + 1))
    data = found[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}
