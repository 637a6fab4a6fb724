"""Many log files are one stream in the order of time, and few of them are open at once."""

from __future__ import annotations

import gzip
import json
import os
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contract import logfiles
from contract.errors import UsageError
from producer import journals

START = 1_790_000_000.0


def line(at: float, **fields: Any) -> str:
    when = datetime.fromtimestamp(START + at, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"timestamp": when, "level": "info", "event": "e", **fields}) + "\n"


def write(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    os.utime(path, (START + 1000, START + 1000))
    return path


def numbers(folder: Path, needle: bytes = b"", since: float | None = None) -> list[int]:
    return [event["n"] for event in journals.merged(folder, lambda line: needle in line, since)]


def test_plain_rotated_and_compressed_files_of_many_processes_are_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path, "worker-a.20260101T000000000000.jsonl.gz", line(0, n=0), line(3, n=3))
    write(tmp_path, "worker-a.20260102T000000000000.jsonl", line(4, n=4), line(7.25, n=7))
    write(tmp_path, "worker-a.jsonl", line(9, n=9))
    write(tmp_path, "producer-h.jsonl", line(1, n=1), "torn {\n", "[1]\n", line(5, n=5), line(7, n=6), line(8, n=8))
    write(tmp_path, "worker-b.jsonl", line(2, n=2))
    write(tmp_path, "audit.jsonl", line(2, n=99))
    write(tmp_path, ".hidden.jsonl", line(2, n=98))
    write(tmp_path, "notes.txt", line(2, n=97))
    write(tmp_path, "empty.jsonl")
    assert numbers(tmp_path) == list(range(10))
    assert numbers(tmp_path, needle=b'"n": 3') == [3]
    assert numbers(tmp_path, since=START + 7) == [6, 7, 8, 9]
    assert numbers(tmp_path, since=START + 2000) == []


def test_a_file_is_open_only_while_the_stream_is_in_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        write(
            tmp_path, f"worker-{number}.jsonl", line(number * 10, n=2 * number), line(number * 10 + 9, n=2 * number + 1)
        )
    opened, most, real = 0, 0, logfiles.lines

    def counted(path: Path) -> Any:
        nonlocal opened, most
        opened, most = opened + 1, max(most, opened + 1)
        try:
            yield from real(path)
        finally:
            opened -= 1

    monkeypatch.setattr(journals, "lines", counted)
    assert numbers(tmp_path) == list(range(100))
    assert most <= 2


def test_memory_does_not_grow_with_the_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, f"{name}.jsonl", *(line(number / 10, n=number, text="x" * 200) for number in range(2_500)))
    tracemalloc.start()
    count = sum(1 for _ in journals.merged(tmp_path, lambda line: True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 5_000
    assert peak < 500_000


def test_since_is_a_span_or_a_moment() -> None:
    assert journals.since("90m") == pytest.approx(time.time() - 5400, abs=5)
    assert journals.since("2026-12-02T22:00") == datetime(2026, 12, 2, 22).timestamp()
    with pytest.raises(UsageError, match="24h, 90m"):
        journals.since("yesterday")
