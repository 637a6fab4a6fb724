"""What people and programs do to the inbox while a producer watches it: every file is one batch, whole, or is left."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract import claimed
from contract.jobs import PromptJob
from contract.ledger import Ledger
from contract.paths import Folders
from producer import hints, inbox, watcher
from producer.claims import copy_some
from producer.inbox import Inbox
from tests.producer.conftest import PRODUCER, submitted

Watching = Callable[..., Any]
Wait = Callable[..., None]
Queued = Callable[..., list[PromptJob]]
Notices = list[dict[str, Any]]


def prompts(queued: Queued) -> list[str]:
    return sorted(str(job.prompt) for job in queued())


# Files that are being written


def test_a_file_that_somebody_has_open_is_left_however_long_it_stands_still(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued, notices: Notices
) -> None:
    with watching(scan_s=0.02) as running, (folders.inputs / "slow.txt").open("w") as stream:
        stream.write("one\ntw")
        stream.flush()
        (folders.inputs / "other.txt").write_text("other\n")  # stands still for no longer than the slow one
        wait_until(submitted(ledger, 1))

        def told_after_long() -> bool:
            running._inbox._seen = {name: seen._replace(since=-1e9) for name, seen in running._inbox._seen.items()}
            return any(notice["event"] == "file_being_written" for notice in notices)

        wait_until(told_after_long)
        assert (folders.inputs / "slow.txt").exists()
        stream.write("o\n")
        stream.close()
        wait_until(submitted(ledger, 2))
    assert prompts(queued) == ["one", "other", "two"]
    assert sum(notice["event"] == "file_being_written" for notice in notices) == 1


def test_a_file_that_grows_without_end_is_spoken_of_and_keeps_no_other_waiting(
    folders: Folders, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("producer.inbox.time.monotonic", lambda: now[0])
    looking = Inbox(folders.inputs, settle_s=1.0)
    (folders.inputs / "done.txt").write_text("done\n")
    taken = set()
    for _ in range(80):
        with (folders.inputs / "log.txt").open("a") as stream:
            stream.write("more\n")
        taken |= {file.name for file, _ in looking.look()}
        now[0] += 1.0
    assert taken == {"done.txt"}
    (notice,) = notices
    assert (notice["event"], notice["file"]) == ("file_being_written", "log.txt")


def test_where_the_system_does_not_tell_who_writes_standing_still_is_enough(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(inbox.fcntl, "F_SETLEASE")
    with watching(), (folders.inputs / "a.txt").open("w") as stream:
        stream.write("one\n")
        stream.flush()
        wait_until(submitted(ledger, 1))


def test_a_source_without_end_is_copied_no_further_than_it_was_long(tmp_path: Path) -> None:
    assert copy_some(Path("/dev/zero"), tmp_path / "copy", (3 << 20) + 1) == (tmp_path / "copy").stat().st_size
    assert (tmp_path / "copy").stat().st_size == (3 << 20) + 1


# Editors


def save_beside_and_rename(file: Path, text: str, hidden: str = ".{}.tmp") -> None:
    """rsync, gedit, nano -U and most programs that care."""
    beside = file.with_name(hidden.format(file.name))
    beside.write_text(text)
    beside.rename(file)


def save_as_vim(file: Path, text: str) -> None:
    """A probe, a swap file, the old one as backup, the new one under the name, the backup gone."""
    probe, swap, backup = file.with_name("4913"), file.with_name(f".{file.name}.swp"), Path(f"{file}~")
    probe.touch()
    probe.unlink()
    swap.write_bytes(b"b0VIM")
    if file.exists():
        file.rename(backup)
    file.write_text(text)
    backup.unlink(missing_ok=True)
    swap.unlink()


def save_as_emacs(file: Path, text: str) -> None:
    """A lock that is a link to nowhere, a file of its own for what is not saved, a backup that stays."""
    lock, automatic = file.with_name(f".#{file.name}"), file.with_name(f"#{file.name}#")
    lock.symlink_to("somebody@somewhere.1:1")
    automatic.write_text(text[:5])
    if file.exists():
        shutil.copyfile(file, f"{file}~")
    file.write_text(text)
    automatic.unlink()
    lock.unlink()


def save_in_place(file: Path, text: str) -> None:
    """Emptied, then written bit by bit."""
    with file.open("w") as stream:
        for char in text:
            stream.write(char)
            stream.flush()


SAVES: list[Callable[[Path, str], None]] = [save_beside_and_rename, save_as_vim, save_as_emacs, save_in_place]


@pytest.mark.parametrize("save", SAVES)
def test_a_file_that_an_editor_saves_again_and_again_is_one_batch_with_its_last_text(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    queued: Queued,
    save: Callable[[Path, str], None],
) -> None:
    with watching(settle_s=1.5, scan_s=0.05):
        for version in range(5):
            save(folders.inputs / "a.txt", f"one {version}\ntwo {version}\n")
            time.sleep(0.04)  # an editor does not save faster, and a watcher looks in between
        wait_until(submitted(ledger, 1))
    assert prompts(queued) == ["one 4", "two 4"]
    assert [entry.name for entry in folders.inputs.iterdir() if not entry.name.endswith("~")] == [".claimed"]


def test_what_is_saved_after_it_was_taken_is_a_batch_of_its_own(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    with watching():
        for number in (1, 2):
            save_as_vim(folders.inputs / "a.txt", f"text {number}\n")
            wait_until(submitted(ledger, number))
    assert prompts(queued) == ["text 1", "text 2"]
    assert sorted(batch.spec.output for batch in ledger.newest()) == ["a", "a-2"]


# Names


def test_a_file_that_is_renamed_while_it_settles_is_taken_under_its_last_name_and_one_that_leaves_is_not(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued, notices: Notices
) -> None:
    with watching(settle_s=1.5, scan_s=0.05) as running:
        for name in ("first.txt", "leaving.txt", "hidden.txt"):
            (folders.inputs / name).write_text(f"{name}\n")
        wait_until(lambda: len(running._inbox._seen) == 3)
        (folders.inputs / "first.txt").rename(folders.inputs / "last.txt")
        (folders.inputs / "leaving.txt").rename(folders.root / "leaving.txt")
        (folders.inputs / "hidden.txt").rename(folders.inputs / "hidden.txt.part")
        wait_until(submitted(ledger, 1))
        (folders.inputs / "end.txt").write_text("end\n")
        wait_until(submitted(ledger, 2))
    assert {batch.spec.source for batch in ledger.newest()} == {"last.txt", "end.txt"}
    assert prompts(queued) == ["end", "first.txt"]
    assert [notice for notice in notices if notice["log_level"] != "info"] == []


def test_names_that_differ_by_case_or_unicode_form_only_are_batches_with_outputs_of_their_own(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, queued: Queued
) -> None:
    names = ["caf\u00e9.txt", "cafe\u0301.txt", "CAF\u00c9.txt", "stra\u00dfe.txt", "STRASSE.txt", "a.txt", "A.TXT"]
    with watching():
        for name in names:
            (folders.inputs / name).write_text(f"{name}\n")
        wait_until(submitted(ledger, len(names)))
    assert prompts(queued) == sorted(names)
    batches = ledger.newest()
    assert {batch.spec.source for batch in batches} == set(names)
    assert len({folded(batch.spec.output) for batch in batches}) == len(names)


def folded(name: str) -> str:
    """As file systems compare names that know neither case nor forms."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


# What is no file of prompts


@pytest.fixture
def bound(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket in the inbox; its address must be short, so that it is given from within."""
    monkeypatch.chdir(folders.inputs)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.txt")
        yield listener


def test_pipes_sockets_links_and_devices_are_left_where_they_are_and_hold_up_nothing(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, bound: socket.socket, notices: Notices
) -> None:
    (folders.root / "elsewhere.txt").write_text("not yours\n")
    (folders.inputs / "link.txt").symlink_to(folders.root / "elsewhere.txt")
    (folders.inputs / "dead.txt").symlink_to("nowhere.txt")
    (folders.inputs / "loop.txt").symlink_to("loop.txt")
    (folders.inputs / "tty.txt").symlink_to("/dev/zero")
    (folders.inputs / "folder.txt").mkdir()
    os.mkfifo(folders.inputs / "pipe.txt")
    strange = {"link.txt", "dead.txt", "loop.txt", "tty.txt", "folder.txt", "pipe.txt", "socket.txt"}
    if os.geteuid() == 0:
        os.mknod(folders.inputs / "zero.txt", 0o20600, os.makedev(1, 5))
        strange.add("zero.txt")
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))
        wait_until(lambda: {notice.get("file") for notice in notices} >= strange)
    assert {notice["file"] for notice in notices if notice["event"] == "file_ignored"} == strange
    assert {entry.name for entry in folders.inputs.iterdir()} == {".claimed", *strange}
    assert (folders.root / "elsewhere.txt").read_text() == "not yours\n"


def test_a_file_without_permission_is_spoken_of_and_taken_when_it_has_it(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    notices: Notices,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The superuser may read everything: what the system would say to others is said for it."""
    monkeypatch.setattr("producer.inbox.os.access", lambda file, mode: bool(os.stat(file).st_mode & 0o400))
    with watching():
        secret = os.open(folders.inputs / "secret.txt", os.O_CREAT | os.O_WRONLY, 0o000)
        os.write(secret, b"two\n")
        os.close(secret)
        wait_until(lambda: any("no permission to read it" in notice.get("reason", "") for notice in notices))
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))
        (folders.inputs / "secret.txt").chmod(0o600)
        wait_until(submitted(ledger, 2))


# Very many


def test_files_are_submitted_while_others_wait_to_be_claimed(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    notices: Notices,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "CLAIMING_S", 0.0)  # one file a scan
    for number in range(40):
        (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
        os.utime(folders.inputs / f"f{number}.txt", (number, number))
    with watching(scan_s=600):
        wait_until(submitted(ledger, 40))
    events = [notice["event"] for notice in notices]
    assert events.index("batch_submitted") < len(events) - 1 - events[::-1].index("batch_created")
    by_age = sorted(ledger.newest(), key=lambda batch: batch.spec.created_at)
    assert [batch.spec.source for batch in by_age] == [f"f{number}.txt" for number in range(40)]


def test_claims_that_wait_for_workers_are_not_read_again_by_every_scan(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching():
        for number in range(20):
            (folders.inputs / f"f{number}.txt").write_text(f"{number}\n")
        wait_until(submitted(ledger, 20))
        reads: list[str] = []
        real = claimed.read_manifest
        monkeypatch.setattr(claimed, "read_manifest", lambda folder: reads.append(folder.name) or real(folder))
        (folders.inputs / "end.txt").write_text("end\n")
        wait_until(submitted(ledger, 21))
    assert {name.partition("-")[0] for name in reads} == {"end"}


# The folder and the system


def test_an_inbox_that_another_folder_takes_the_place_of_is_watched_in_its_place(
    watching: Watching, folders: Folders, ledger: Ledger, wait_until: Wait
) -> None:
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))
        new = folders.root / "new"
        new.mkdir()
        (new / "b.txt").write_text("two\n")
        folders.inputs.rename(folders.root / "old")
        new.rename(folders.inputs)
        wait_until(submitted(ledger, 2))
        (folders.inputs / "c.txt").write_text("three\n")
        wait_until(submitted(ledger, 3))


LIMITS = {errno.ENOSPC: "fs.inotify.max_user_watches", errno.EMFILE: "fs.inotify.max_user_instances"}


@pytest.mark.parametrize("code", LIMITS)
def test_without_file_events_scans_go_on_and_it_says_how_to_raise_the_limit(
    watching: Watching,
    folders: Folders,
    ledger: Ledger,
    wait_until: Wait,
    notices: Notices,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def exhausted(observer: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hints.Observer, "start", exhausted)
    with watching():
        (folders.inputs / "a.txt").write_text("one\n")
        wait_until(submitted(ledger, 1))
    (notice,) = (notice for notice in notices if notice["event"] == "no_file_events")
    assert f"raise it with `sysctl {LIMITS[code]}=" in notice["reason"]


def test_a_system_that_really_gives_no_watches(
    folders: Folders, redis_url: str, ledger: Ledger, wait_until: Wait
) -> None:
    """In a user namespace of its own the limit can be set for the one process alone."""
    limited = "echo 0 > /proc/sys/user/max_inotify_instances"
    if subprocess.run(["unshare", "-Ur", "sh", "-c", limited], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no user namespaces")
    words = [*PRODUCER, "watch", "--root", str(folders.root), "--redis-url", redis_url]
    environment = {**os.environ, "DLLM_SETTLE_S": "0", "DLLM_SCAN_S": "0.05"}
    command = ["unshare", "-Ur", "sh", "-c", f'{limited}; exec "$@"', "sh", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            (folders.inputs / "a.txt").write_text("one\n")
            wait_until(submitted(ledger, 1))
        finally:
            process.terminate()
        told = process.communicate(timeout=20)[1]
    assert "sysctl fs.inotify.max_user_instances=512" in told
    assert process.returncode == 0


def test_a_watcher_does_not_die_of_a_writer_that_comes_while_it_asks(tmp_path: Path) -> None:
    """Whoever opens a leased file makes the kernel send a signal; unhandled, its usual one ends the process."""
    file = tmp_path / "a.txt"
    file.touch()
    told = threading.Event()

    def write() -> None:
        while not told.is_set():
            file.open("a").close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5000):
            inbox._being_written(file)
    finally:
        told.set()
        writer.join()
