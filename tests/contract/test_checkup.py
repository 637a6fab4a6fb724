"""What is wrong with machine and server, told from what they say of themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from contract import checkup


@pytest.mark.parametrize(
    ("info", "what", "note"),
    [
        ({}, None, False),
        ({"aof_enabled": 1, "aof_last_write_status": "ok"}, None, False),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "aof_last_write_status is err", False),
        ({"aof_enabled": 0, "rdb_last_bgsave_status": "err"}, "rdb_last_bgsave_status is err", False),
        ({"aof_enabled": 0}, "since its last snapshot", True),
    ],
)
def test_whether_the_server_keeps_its_data(info: dict[str, Any], what: str | None, note: bool) -> None:
    found = checkup.persistence(info)
    assert (found is None) == (what is None)
    if found and what:
        assert what in found.what
        assert found.note is note


def test_how_much_memory_the_server_has_left() -> None:
    assert checkup.memory({"used_memory": 999, "maxmemory": 0}) is None
    assert checkup.memory({"used_memory": 80 << 20, "maxmemory": 100 << 20}) is None
    found = checkup.memory({"used_memory": 95 << 20, "maxmemory": 100 << 20})
    assert found
    assert "95 MB of the 100" in found.what


def test_clocks_and_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    assert checkup.clock(now, now) is None
    ahead, behind = checkup.clock(now + 9, now), checkup.clock(now - 9, now)
    assert ahead
    assert behind
    assert "ahead of" in ahead.what
    assert "behind" in behind.what
    monkeypatch.setattr(checkup, "LEAST_FREE_BYTES", 1 << 62)
    assert checkup.disk(tmp_path)
