"""Files of lines: rotated by size and age, by whoever notices, without a line lost; compressed and removed in time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contract import logfiles
from contract.logfiles import Limits, LogFile, lines, listed, tidy

ROOMY = Limits(max_bytes=1 << 20, max_age_s=3600.0, keep_s=3600.0, keep_bytes=1 << 30)


@pytest.fixture(autouse=True)
def _tidied_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfiles, "tidy_soon", lambda *_: None)


def everything(folder: Path) -> list[str]:
    return [line.decode().strip() for found in listed(folder) for line in lines(found.path)]


def test_a_full_file_is_rotated_and_no_line_is_lost(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "w.jsonl", replace(ROOMY, max_bytes=100))
    for number in range(40):
        assert file.write(f"line {number:03}\n")
    assert everything(tmp_path) == [f"line {number:03}" for number in range(40)]
    assert len(listed(tmp_path)) == 4
    assert all(found.size <= 100 for found in listed(tmp_path))


def test_an_old_file_is_rotated_by_the_age_of_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text(json.dumps({"timestamp": "2026-01-01T00:00:00Z"}) + "\n")
    LogFile(tmp_path / "w.jsonl", ROOMY).write("new\n")
    old, new = listed(tmp_path)
    assert (old.stem, new.stem) == ("w", "w")
    assert (bool(old.stamp), bool(new.stamp)) == (True, False)
    assert list(lines(new.path)) == [b"new\n"]


def test_many_writers_of_one_file_rotate_it_together(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        file = LogFile(tmp_path / "p.jsonl", replace(ROOMY, max_bytes=2_000))
        for number in range(200):
            assert file.write(f"{writer} {number}\n")

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(everything(tmp_path)) == sorted(f"{writer} {number}" for writer in range(3) for number in range(200))


def test_a_line_torn_by_a_crash_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "w.jsonl").write_text("whole\nto")
    LogFile(tmp_path / "w.jsonl", ROOMY).write("next\n")
    assert everything(tmp_path) == ["whole", "to", "next"]


def test_a_file_that_was_removed_is_begun_anew(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "w.jsonl", ROOMY)
    file.write("one\n")
    (tmp_path / "w.jsonl").unlink()
    file.write("two\n")
    assert everything(tmp_path) == ["two"]


@pytest.fixture
def rotated(tmp_path: Path) -> Callable[..., Path]:
    def make(stem: str, day: int, age_s: float, size: int = 1000) -> Path:
        path = tmp_path / f"{stem}.202601{day:02}T000000000000.jsonl"
        path.write_text(f"{stem} {day} {'x' * size}\n")
        os.utime(path, (time.time() - age_s, time.time() - age_s))
        return path

    return make


def test_all_but_the_newest_are_compressed_and_read_as_before(tmp_path: Path, rotated: Callable[..., Path]) -> None:
    paths = [rotated("w", day, 100 - day) for day in (1, 2, 3)]
    before = everything(tmp_path)
    tidy(tmp_path, ROOMY, "w")
    assert [found.compressed for found in listed(tmp_path)] == [True, True, False]
    assert everything(tmp_path) == before
    assert list(lines(paths[0])), "a reader that listed it before finds it still"
    assert abs(listed(tmp_path)[0].modified - (time.time() - 99)) < 10


def test_what_is_too_old_or_too_much_goes_whoever_wrote_it(tmp_path: Path, rotated: Callable[..., Path]) -> None:
    rotated("dead", 1, 5000)
    rotated("w", 1, 300)
    rotated("w", 2, 200)
    rotated("other", 3, 100)
    rotated("audit", 1, 9000)
    tidy(tmp_path, replace(ROOMY, keep_bytes=1500), "w")
    assert [(found.stem, found.stamp[6:8]) for found in listed(tmp_path)] == [("audit", "01"), ("other", "03")]
    tidy(tmp_path, ROOMY, "audit")
    assert "audit" not in {found.stem for found in listed(tmp_path)}
