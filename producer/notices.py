"""Warnings that are given once for as long as their cause lasts, though every scan meets it again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from contract import logs


class Notices:
    """What the user has been told already, by a key that names the cause."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, key: str, event: str, **values: Any) -> None:
        """Log `event` as a warning unless `key` was warned about before."""
        if key not in self._told:
            self._told.add(key)
            logs.get().warning(event, **values)

    def clear(self, key: str) -> None:
        """The cause is gone: should it come back, that is news."""
        self._told.discard(key)

    def keep(self, keys: Collection[str]) -> None:
        """Forget every key that is not in `keys`."""
        self._told.intersection_update(keys)
