"""A segment gives back every row that was appended, whatever tore the file in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract import segments
from contract.ledger import Mark
from contract.paths import Folders
from contract.segments import SegmentWriter


def indices(path: Path) -> list[int]:
    return [row.index for row in segments.rows(path)]


@pytest.fixture
def path(folders: Folders) -> Path:
    return folders.segments / "b" / "w.jsonl"


def test_rows_are_found_where_they_lie(
    folders: Folders, path: Path, completion: Callable[..., Any], failure: Callable[..., Any]
) -> None:
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(3, output="line\nfeed   ünï"), failure(1)])
        writer.append([completion(0)])
    data = path.read_bytes()
    rows = list(segments.rows(path))
    assert [(row.index, row.kind) for row in rows] == [(3, Mark.DONE), (1, Mark.FAILED), (0, Mark.DONE)]
    for row in rows:
        line = data[row.offset : row.offset + row.length + 1]
        assert segments.parse(line)["index"] == row.index  # type: ignore[index]


def test_one_fsync_makes_many_rows_durable(
    folders: Folders, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        writer.append([completion(index) for index in range(1, 50)])
        assert len(synced) == 1


@pytest.mark.parametrize("torn", [b'{"index":9,"id":"x","out', b'{"index":9,"output":"\xc3', b"\x00\x00", b"{"])
def test_a_torn_last_line_stays_torn_and_harms_nothing(
    folders: Folders, path: Path, completion: Callable[..., Any], torn: bytes
) -> None:
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
    with path.open("ab") as stream:
        stream.write(torn)
    assert indices(path) == [0]
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(1)])
    assert indices(path) == [0, 1]


def test_a_line_without_its_line_feed_was_never_acknowledged(path: Path, completion: Callable[..., Any]) -> None:
    path.parent.mkdir()
    path.write_bytes(segments.line(completion(0)).rstrip(b"\n"))
    assert indices(path) == []


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b'{"index":"0","output":""}', b'{"index":-1,"output":""}', b'{"index":true,"output":""}', b""]
)
def test_lines_that_are_no_rows_are_passed_over(path: Path, line: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(line + b"\n")
    assert indices(path) == []


def test_a_full_disk_is_reported_and_spoils_no_row(
    folders: Folders, path: Path, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def half(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
        with monkeypatch.context() as full:
            full.setattr(os, "write", half)
            with pytest.raises(OSError, match="No space"):
                writer.append([completion(1), completion(2)])
        assert indices(path) == [0]
        writer.append([completion(1), completion(2)])
    assert indices(path) == [0, 1, 2]
    assert len(path.read_bytes().splitlines()) == 3


def test_rows_survive_a_full_disk_that_cannot_even_be_cut_back(
    folders: Folders, path: Path, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            broken.setattr(os, "ftruncate", fail)
            with pytest.raises(OSError, match="broken"):
                writer.append([completion(1)])
        writer.append([completion(2)])
    assert {0, 2} <= set(indices(path))


def test_a_segment_taken_away_by_publishing_is_begun_anew(
    folders: Folders, path: Path, completion: Callable[..., Any]
) -> None:
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0)])
        path.unlink()
        path.parent.rmdir()
        writer.append([completion(1)])
    assert indices(path) == [1]


def test_two_living_writers_of_one_name_do_not_share_a_file(folders: Folders, completion: Callable[..., Any]) -> None:
    with SegmentWriter(folders, "b", "w") as first, SegmentWriter(folders, "b", "w") as second:
        first.append([completion(0)])
        second.append([completion(1)])
        first.append([completion(2)])
    found = segments.files(folders.segments / "b")
    assert sorted(indices(file) for file in found) == [[0, 2], [1]]


def test_any_writer_name_is_one_file_in_the_batch_folder(folders: Folders, completion: Callable[..., Any]) -> None:
    with SegmentWriter(folders, "b", "../a/b c") as writer:
        writer.append([completion(0)])
    assert len(segments.files(folders.segments / "b")) == 1


def test_half_a_surrogate_pair_is_kept(folders: Folders, path: Path, completion: Callable[..., Any]) -> None:
    with SegmentWriter(folders, "b", "w") as writer:
        writer.append([completion(0, prompt="\ud83d")])
    line = path.read_bytes()
    assert segments.parse(line)["prompt"] == "\ud83d"  # type: ignore[index]
    assert line.startswith(b'{"index"')
