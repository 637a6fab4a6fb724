"""Kills, stops and restarts at random, for a while: every prompt ends in exactly one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.chaos import Chaos


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_under_fire(tmp_path: Path) -> None:
    tally = Chaos(tmp_path, prompts=2000, seed=1).run(seconds=45)
    assert tally.server_kills == 3
    assert not tally.unfinished, tally
    assert (tally.lost, tally.doubled) == (0, 0), tally
    assert tally.errors.pop("bad_json") == 20
    assert set(tally.errors) <= {"worker_crashed"}, tally  # it ran through three kills: quarantine as promised
    assert tally.rows + sum(tally.errors.values()) == tally.prompts - 20
