"""Publishing shows all or nothing; moving never overwrites and never loses the last copy."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from contract import paths
from contract.paths import Folders
from tests.crashing import Crash


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "f.txt"
    path.parent.mkdir()
    path.write_text("mine")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def other_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


def test_folders_are_made_and_existing_ones_kept(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "root").create()
    (folders.inputs / "f.txt").write_text("x")
    folders.create()
    assert (folders.inputs / "f.txt").read_text() == "x"
    assert folders.claimed.is_dir()
    assert folders.segments.is_dir()
    assert folders.processed.is_dir()
    assert not folders.redis.exists()


def test_publishing_replaces_in_one_step(tmp_path: Path) -> None:
    part, target = tmp_path / ".part", tmp_path / "f.jsonl"
    target.write_text("old")
    reader = target.open()
    part.write_text("new")
    paths.publish(part, target)
    assert target.read_text() == "new"
    assert reader.read() == "old"
    reader.close()
    assert not part.exists()


def test_what_is_published_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *ends: (order.append("replace"), replace(*ends)))
    (tmp_path / ".part").write_text("x")
    paths.publish(tmp_path / ".part", tmp_path / "f")
    assert order == ["fsync", "replace", "fsync"]


def test_a_moved_file_is_there_and_no_longer_here(source: Path, target: Path) -> None:
    assert paths.move(source, target) == target / "f.txt"
    assert (target / "f.txt").read_text() == "mine"
    assert not source.exists()


@pytest.mark.parametrize("across", [False, True])
def test_moving_never_overwrites(source: Path, target: Path, request: pytest.FixtureRequest, across: bool) -> None:
    if across:
        request.getfixturevalue("other_file_system")
    target.mkdir()
    (target / "f.txt").write_text("first")
    (target / "f-2.txt").symlink_to("nowhere")
    assert paths.move(source, target) == target / "f-3.txt"
    assert (target / "f.txt").read_text() == "first"
    assert (target / "f-2.txt").is_symlink()
    assert (target / "f-3.txt").read_text() == "mine"
    assert not source.exists()


def test_a_name_taken_at_the_last_moment_is_left_alone(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def overtaken(origin: Path, wanted: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        wanted.write_text("theirs")
        link(origin, wanted)

    monkeypatch.setattr(os, "link", overtaken)
    assert paths.move(source, target) == target / "f-2.txt"
    assert (target / "f.txt").read_text() == "theirs"


@pytest.mark.usefixtures("other_file_system")
def test_across_file_systems_the_copy_is_whole_before_the_source_goes(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paths.move(source, target) == target / "f.txt"
    assert (target / "f.txt").read_text() == "mine"
    assert not source.exists()
    assert [path.name for path in target.iterdir()] == ["f.txt"]


@pytest.mark.usefixtures("other_file_system")
def test_a_full_disk_across_file_systems_keeps_the_source(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("contract.paths.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        paths.move(source, target)
    assert source.read_text() == "mine"
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["f.csv.gz", "f.params.yaml"])
def test_the_number_goes_before_an_ending_of_two_parts(tmp_path: Path, name: str) -> None:
    source, target = tmp_path / name, tmp_path / "target"
    target.mkdir()
    for path in (source, target / name):
        path.write_text(str(path))
    assert paths.move(source, target) == target / name.replace("f", "f-2", 1)


def test_a_crash_between_link_and_unlink_is_finished_by_the_next_move(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise Crash

    target.mkdir()
    (target / "f.txt").write_text("first")
    with monkeypatch.context() as dying:
        dying.setattr(Path, "unlink", die)
        with pytest.raises(Crash):
            paths.move(source, target)
    assert paths.move(source, target) == target / "f-2.txt"
    assert sorted(path.name for path in target.iterdir()) == ["f-2.txt", "f.txt"]
    assert not source.exists()


def test_an_unexpected_error_is_not_swallowed(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(OSError, match="broken"):
        paths.move(source, target)
    assert source.exists()
