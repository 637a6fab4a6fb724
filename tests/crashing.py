"""A process that dies at a certain step, for tests of what comes after."""

from __future__ import annotations

from typing import Any

import pytest


class Crash(BaseException):
    """The process dies here: nothing that comes after runs."""


def dying_at(owner: Any, name: str, call: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `call`-th call of it, from 0, is the last thing that happens."""
    step, calls = getattr(owner, name), iter(range(1000))

    def crashing(*args: Any, **values: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            raise Crash
        result = step(*args, **values)
        if last:
            raise Crash
        return result

    monkeypatch.setattr(owner, name, crashing)
