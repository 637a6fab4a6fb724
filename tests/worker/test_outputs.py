"""A row is on the disk when `write` returns, and is published once however often it was written."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from contract import sealing, segments
from contract.ledger import BatchState, Ledger, Mark
from contract.paths import Folders
from worker import outputs as outputs_module
from worker.outputs import Outputs

DISK_FULL = """
import resource, signal, sys
from contract.jobs import Completion, Usage
from contract.paths import Folders
from contract.segments import SegmentWriter
from worker.outputs import Outputs

def row(index):
    return Completion(index=index, id=str(index), prompt="p", output="x" * 300, finish_reason="stop",
                      usage=Usage(prompt_tokens=1, completion_tokens=1), model="demo", params={}, timing={},
                      denoise={}, worker="w")

from pathlib import Path
from types import SimpleNamespace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = SimpleNamespace(get=lambda batch: None)
outputs = Outputs(Folders(Path(sys.argv[1])), ledger, "w")
outputs.write([("b", row(0))])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
again = [("b", row(1)), ("b", row(2))]
try:
    outputs.write(again)
except OSError as error:
    print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
outputs.write(again)
"""


@pytest.fixture
def outputs(folders: Folders, ledger: Ledger) -> Any:
    with Outputs(folders, ledger, "w") as one:
        yield one


def mark(ledger: Ledger, batch: str, *indices: int) -> None:
    with ledger.redis.pipeline() as pipe:
        for index in indices:
            ledger.mark(pipe, batch, index, Mark.DONE)
        pipe.execute()


def found(folders: Folders, batch: str = "b") -> list[int]:
    return [row.index for path in segments.files(folders.segments / batch) for row in segments.rows(path)]


def published(folders: Folders, name: str = "b") -> list[str]:
    return [json.loads(line)["output"] for line in (folders.outputs / f"{name}.jsonl").read_text().splitlines()]


def test_rows_of_several_batches_go_to_their_segments_with_one_fsync_each(
    outputs: Outputs, folders: Folders, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs.write([("a", completion(0)), ("b", completion(0))])
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    outputs.write([("a", completion(1)), ("b", completion(1)), ("a", completion(2))])
    assert sorted(Path(path).parent.name for path in synced) == ["a", "b"]
    assert (found(folders, "a"), found(folders, "b")) == ([0, 1, 2], [0, 1])


def test_writing_nothing_makes_no_file(outputs: Outputs, folders: Folders) -> None:
    outputs.write([])
    assert list(folders.segments.iterdir()) == []


def test_no_more_files_are_open_than_allowed_and_all_can_be_written_again(
    outputs: Outputs, folders: Folders, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs_module, "OPEN_BATCHES", 2)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(2):
        for batch in "abcde":
            outputs.write([(batch, completion(index))])
    assert len(os.listdir("/proc/self/fd")) - before == 2
    assert all(found(folders, batch) == [0, 1] for batch in "abcde")
    outputs.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_row_written_again_after_a_full_disk_is_published_once(
    outputs: Outputs,
    folders: Folders,
    ledger: Ledger,
    submit: Callable[..., str],
    completion: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, write, room = submit(4), os.write, [10_000]
    rows = [(batch, completion(index, "x" * 100)) for index in range(3)]
    outputs.write([(batch, completion(3))])

    def filling(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, bytes(data)[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", filling)
        room[0] = len(segments.line(rows[0][1])) + 50
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                outputs.write(rows)
        assert found(folders) == [3]
    outputs.write(rows)
    outputs.write(rows[:1])
    mark(ledger, batch, 0, 1, 2, 3)
    assert outputs.sealed_if_complete([batch]) == [batch]
    assert published(folders) == ["x" * 100] * 3 + ["output 3"]


def test_a_full_disk_leaves_other_batches_written_and_all_can_be_repeated(
    outputs: Outputs, folders: Folders, completion: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", completion(0)), ("b", completion(0))]
    fsync, calls = os.fsync, []

    def second_fails(descriptor: int) -> None:
        if "/b/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", second_fails)
        with pytest.raises(OSError, match="No space"):
            outputs.write(rows)
    assert calls
    outputs.write(rows)
    assert found(folders, "a") == [0, 0]
    assert found(folders, "b") == [0]


def test_a_real_limit_on_the_files_size_leaves_whole_rows_only(folders: Folders) -> None:
    command = [sys.executable, "-c", DISK_FULL, str(folders.root)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [str(errno.EFBIG)]
    assert found(folders) == [0, 1, 2]
    (path,) = segments.files(folders.segments / "b")
    assert len(path.read_bytes().splitlines()) == 3


def test_only_complete_batches_are_sealed(
    outputs: Outputs, folders: Folders, ledger: Ledger, submit: Callable[..., str], completion: Callable[..., Any]
) -> None:
    whole, part = submit(1, batch="whole"), submit(2, batch="part")
    outputs.write([(whole, completion(0)), (part, completion(0))])
    mark(ledger, whole, 0)
    mark(ledger, part, 0)
    assert outputs.sealed_if_complete([whole, part, whole, "nobody"]) == [whole]
    assert published(folders, whole) == ["output 0"]
    assert not (folders.outputs / "part.jsonl").exists()
    assert outputs.sealed_if_complete([whole]) == []


def test_a_batch_retried_after_publishing_gets_a_new_segment(
    outputs: Outputs,
    folders: Folders,
    ledger: Ledger,
    submit: Callable[..., str],
    completion: Callable[..., Any],
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = submit(1)
    outputs.write([(batch, completion(0))])
    mark(ledger, batch, 0)
    monkeypatch.setattr(sealing, "SYNCED_S", 0.0)
    assert sealing.seal_ready(ledger, folders) == [batch]  # by another process
    outputs.write([(batch, completion(0, "again"))])
    assert found(folders) == [0]


def test_a_batch_that_cannot_be_published_is_left_for_later_and_holds_up_no_other(
    outputs: Outputs, folders: Folders, ledger: Ledger, submit: Callable[..., str], completion: Callable[..., Any]
) -> None:
    for batch in (submit(1, batch="a"), submit(1, batch="b")):
        outputs.write([(batch, completion(0))])
        mark(ledger, batch, 0)
    (folders.outputs / "a.jsonl").mkdir()
    assert outputs.sealed_if_complete(["a", "b"]) == ["b"]
    (folders.outputs / "a.jsonl").rmdir()
    assert outputs.sealed_if_complete(["a"]) == ["a"]
    assert ledger.get("a").state is BatchState.DONE  # type: ignore[union-attr]


def test_an_outage_while_sealing_is_not_raised(
    outputs: Outputs, ledger: Ledger, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submit(0)

    def away(*_: Any) -> None:
        raise outputs_module.RedisError("gone")

    with monkeypatch.context() as outage:
        outage.setattr(Ledger, "get", away)
        assert outputs.sealed_if_complete([batch]) == []
    assert outputs.sealed_if_complete([batch]) == [batch]
