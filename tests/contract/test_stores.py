"""Outputs in an object store: whole segments in, whole files out, and the same end whatever crashes on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from redis import Redis

from contract import cancelling, claimed, objects, sealing, stores
from contract.auditing import Auditor
from contract.errors import SettingsError, StoreError, UsageError
from contract.jobs import Row
from contract.ledger import BatchState, Ledger, Mark
from contract.objects import FileStore, ObjectStore
from contract.paths import Folders
from contract.queues import queue
from contract.settings import ProducerSettings, WorkerSettings, read
from producer import doctor, report
from tests.conftest import batch_spec, completion_row, failure_row
from tests.crashing import Crash, dying_at

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=["file", "memory"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Folders:
    """Folders whose outputs go to a store; rows and files may lie nowhere else."""
    place = f"{tmp_path}/store" if request.param == "file" else uuid4().hex
    return Folders(tmp_path / "root", f"{request.param}://{place}").create()


only_files = pytest.mark.parametrize("folders", ["file"], indirect=True)
only_memory = pytest.mark.parametrize("folders", ["memory"], indirect=True)


@pytest.fixture(autouse=True)
def _cleared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "SYNCED_S", 0.0)


@pytest.fixture
def write(folders: Folders, ledger: Ledger) -> Callable[..., None]:
    """Put rows into the store and mark them, as a worker does."""

    def written(batch: str, writer: str, *rows: Row) -> None:
        with stores.of(folders).segment(batch, writer) as segment, ledger.redis.pipeline() as pipe:
            segment.append(rows)
            for row in rows:
                ledger.mark(pipe, batch, row.index, Mark.DONE if hasattr(row, "output") else Mark.FAILED)
            pipe.execute()

    return written


@pytest.fixture
def mixed(submit: Callable[..., str], write: Any, folders: Folders) -> Callable[..., str]:
    """Make a complete batch of five rows from two writers, the second and fourth of which failed."""

    def made(**values: Any) -> str:
        batch = submit(5, outputs_url=folders.outputs_url, **values)
        write(batch, "a", completion_row(4), failure_row(1))
        write(batch, "b", completion_row(0), failure_row(3), completion_row(2))
        return batch

    return made


def contents(folders: Folders) -> dict[str, bytes]:
    """All objects of the store by name."""
    files, base = fsspec.core.url_to_fs(folders.outputs_url)
    found = files.find(base)
    return {path.removeprefix(f"{base}/"): files.cat_file(path) for path in found}


def rows(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def answers(folders: Folders, name: str = "b.jsonl") -> list[str]:
    return [row["output"] for row in rows(contents(folders)[name])]


def messages(folders: Folders, name: str = "b.errors.jsonl") -> list[str]:
    return [row["error"]["message"] for row in rows(contents(folders)[name])]


# The whole way


def test_a_batch_is_published_as_whole_objects_in_index_order_and_nothing_else_stays(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    batch = mixed(kind="txt", source="b.txt", output_format="csv", output="below/b")
    assert [name for name in contents(folders) if not name.startswith(".segments/b/")] == []
    assert len(contents(folders)) == 2
    assert sealing.seal_ready(ledger, folders) == [batch]
    ends = ["csv", "errors.jsonl", "jsonl", "summary.json", "txt"]
    assert sorted(contents(folders)) == [f"below/b.{end}" for end in ends]
    assert answers(folders, "below/b.jsonl") == ["output 0", "output 2", "output 4"]
    assert [row["id"] for row in rows(contents(folders)["below/b.errors.jsonl"])] == ["id-1", "id-3"]
    assert [path for path in folders.outputs.rglob("*") if path.is_file()] == []
    assert list(folders.segments.iterdir()) == []
    told = report.published(ledger.get(batch), folders)  # type: ignore[arg-type]
    assert told == [f"{folders.outputs_url}/below/b.{end}" for end in ("jsonl", "txt", *ends[1:2], "csv", ends[3])]


def test_rows_so_far_and_published_rows_are_read_from_the_store(
    submit: Callable[..., str], write: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(3, outputs_url=folders.outputs_url)

    def told() -> tuple[list[str], list[str]]:
        record = ledger.get(batch)
        assert record is not None
        lines = report.outputs(record, ledger.bitmap(batch, Mark.DONE), folders)
        failed = [row.id for row in sealing.errors(batch, ledger, folders)]
        return [json.loads(line)["output"] for line in lines], failed

    write(batch, "w", failure_row(1), completion_row(2))
    assert told() == (["output 2"], ["id-1"])
    write(batch, "w", completion_row(0))
    sealing.seal(batch, ledger, folders)
    assert told() == (["output 0", "output 2"], ["id-1"])
    stores.of(folders).delete("b.jsonl")
    with pytest.raises(UsageError, match=r"b\.jsonl is not there any more"):
        told()


@only_files
def test_retried_rows_of_a_published_batch_are_published_with_the_others(
    mixed: Callable[..., str], write: Any, ledger: Ledger, folders: Folders, redis: Redis, failing: Any
) -> None:
    batch = mixed()
    sealing.seal_ready(ledger, folders)
    failing(batch, 1, 3)
    assert sealing.retry(batch, None, ledger, folders, redis, ids=["id-1"]) == 1
    write(batch, "c", failure_row(1, "again"))
    sealing.seal_ready(ledger, folders)
    assert messages(folders) == ["again", "it failed"]
    failing(batch, 1, 3)
    assert sealing.retry(batch, None, ledger, folders, redis) == 2
    write(batch, "c", completion_row(1), completion_row(3))
    sealing.seal_ready(ledger, folders)
    assert answers(folders) == [f"output {index}" for index in range(5)]
    assert sorted(contents(folders)) == ["b.jsonl", "b.summary.json"]


@pytest.fixture
def failing(redis: Redis) -> Callable[..., None]:
    """Put jobs of rows among RQ's failed ones, where `retry` looks for them."""

    def failed(batch: str, *indices: int) -> None:
        registry = queue(redis, "demo", "normal").failed_job_registry
        for index in indices:
            redis.zadd(registry.key, {f"{batch}-{index}": time.time() + 1000})

    return failed


@only_files
def test_a_cancelled_batch_is_published_with_what_it_has(
    submit: Callable[..., str], write: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(3, outputs_url=folders.outputs_url)
    write(batch, "w", completion_row(1))
    assert cancelling.cancel(batch, ledger, folders).published
    assert answers(folders) == ["output 1"]
    assert [row["error"]["code"] for row in rows(contents(folders)["b.errors.jsonl"])] == ["cancelled"] * 2


def test_the_last_of_several_errors_of_a_row_is_published(
    submit: Callable[..., str], write: Any, ledger: Ledger, folders: Folders
) -> None:
    batch = submit(1, outputs_url=folders.outputs_url)
    for writer in "zyx":
        write(batch, writer, failure_row(0, f"by {writer}"))
    sealing.seal(batch, ledger, folders)
    assert messages(folders) == ["by x"]


@only_memory
def test_many_segments_come_in_few_files_and_what_is_no_row_spoils_none(
    submit: Callable[..., str], write: Any, ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "AT_A_TIME", 2)
    batch = submit(5, outputs_url=folders.outputs_url)
    store = stores.of(folders)
    assert isinstance(store, ObjectStore)
    for index in range(5):
        write(batch, "w", completion_row(index))
        store.put_segment(batch, objects.segment_name("stranger"), b'{"index": 0, "out')
    with store.workplace(batch) as place:
        assert len(store.segments(batch, place)) == 5
    sealing.seal(batch, ledger, folders)
    assert answers(folders) == [f"output {index}" for index in range(5)]


def test_a_name_that_has_a_file_in_the_store_is_not_given_to_a_batch(ledger: Ledger, folders: Folders) -> None:
    store = stores.of(folders)
    with store.workplace("b") as place:
        (place / "part").write_bytes(b"somebody's\n")
        store.publish(place / "part", "own.csv")
    assert claimed.reserve_output("own", "b", ledger, folders) == "own-2"
    assert contents(folders) == {"own.csv": b"somebody's\n"}


@only_files
def test_segments_of_nobody_are_put_aside_in_the_store(ledger: Ledger, folders: Folders) -> None:
    with stores.of(folders).segment("nobody", "w") as segment:
        segment.append([completion_row(0)])
    old = time.time() - 7200
    os.utime(folders.segments / "nobody", (old, old))
    auditor = Auditor(ledger, folders)
    (finding,) = auditor.look()
    assert finding.kind == "orphan_segments"
    assert auditor.repair(finding) == f"moved to {folders.outputs_url}/.orphans/nobody"
    ((name, content),) = contents(folders).items()
    assert name.startswith(".orphans/nobody/")
    assert rows(content)[0]["output"] == "output 0"
    assert auditor.look() == []


# Crashes

STEPS: list[tuple[Any, str, int]] = [
    (ObjectStore, "segments", 0),
    (sealing, "_merge", 0),
    *((FileStore, "_put_file", call) for call in range(5)),
    (sealing, "_put_source_away", 0),
    (Ledger, "close", 0),
    (ObjectStore, "clear", 0),
]


@only_files
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name", "call"), STEPS, ids=[f"{name}-{call}" for _, name, call in STEPS])
def test_a_crash_at_any_step_of_publishing_leads_to_the_same_end(
    mixed: Callable[..., str],
    ledger: Ledger,
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    batch = mixed(kind="txt", source="b.txt", output_format="csv")
    with monkeypatch.context() as dying:
        dying_at(owner, name, call, after, dying)
        with pytest.raises(Crash):
            sealing.seal_ready(ledger, folders)
    sealing.seal_ready(ledger, folders)
    assert ledger.get(batch).state is BatchState.DONE  # type: ignore[union-attr]
    assert sorted(contents(folders)) == ["b.csv", "b.errors.jsonl", "b.jsonl", "b.summary.json", "b.txt"]
    assert answers(folders) == ["output 0", "output 2", "output 4"]
    assert len(messages(folders)) == 2
    assert [file.name for file in folders.processed.iterdir()] == ["b.txt"]


@only_files
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), [(ObjectStore, "clear"), (FileStore, "_put_file"), (Ledger, "reopen")])
def test_a_crash_at_any_step_of_a_retry_loses_no_published_row(
    mixed: Callable[..., str],
    write: Any,
    ledger: Ledger,
    folders: Folders,
    redis: Redis,
    failing: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    after: bool,
) -> None:
    batch = mixed()
    sealing.seal_ready(ledger, folders)
    failing(batch, 1, 3)
    with monkeypatch.context() as dying:
        dying_at(owner, name, 0, after, dying)
        with pytest.raises(Crash):
            sealing.retry(batch, None, ledger, folders, redis)
    reopened = owner is Ledger and after
    assert sealing.retry(batch, None, ledger, folders, redis) == (0 if reopened else 2)
    write(batch, "c", completion_row(1), completion_row(3))
    sealing.seal_ready(ledger, folders)
    assert answers(folders) == [f"output {index}" for index in range(5)]


KILLED = """
import os, signal, sys
from pathlib import Path
from contract import paths, stores
from contract.paths import Folders
from tests.conftest import completion_row

moment, root, url = sys.argv[1:]
store, replace, copy = stores.of(Folders(Path(root), url)), os.replace, Path.write_bytes
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def torn(path, data):
    copy(path, data[:20])
    die()
if moment == "torn":
    Path.write_bytes = torn
elif moment == "before":
    os.replace = die
elif moment == "after":
    os.replace = lambda *args: (replace(*args), die())
with store.segment("b", "w") as segment:
    segment.append([completion_row(0)])
"""


@only_files
@pytest.mark.parametrize(("moment", "found"), [("torn", []), ("before", []), ("after", [0])])
def test_a_process_killed_in_a_put_leaves_the_whole_segment_or_none(
    folders: Folders, moment: str, found: list[int]
) -> None:
    command = [sys.executable, "-c", KILLED, moment, str(folders.root), str(folders.outputs_url)]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == -9
    store = stores.of(folders)
    with store.workplace("b") as place:
        texts = [line for path in store.segments("b", place) for line in path.read_bytes().splitlines() if line]
    assert [json.loads(text)["index"] for text in texts] == found


@only_files
def test_what_a_killed_sealer_left_in_the_temporary_folder_is_removed(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    store = stores.of(folders)
    with store.workplace("b") as mine:
        left = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
        left.mkdir()
        with store.workplace("c"):
            assert not left.exists()
            assert mine.exists()
    assert not mine.exists()


# Trouble


class Refusing(MemoryFileSystem):
    """A store of which some calls fail for a while."""

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        left = object.__getattribute__(self, "__dict__").get("refused", {})
        if left.get(name, 0):
            left[name] -= 1
            raise RuntimeError(f"no {name} for you")
        return super().__getattribute__(name)


@pytest.fixture
def refusing(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    files = Refusing()
    store = ObjectStore(files, f"/{uuid4().hex}", str(folders.outputs_url), folders)
    monkeypatch.setattr(stores, "_opened", lambda folders: store)
    yield files
    Refusing.store.clear()


@only_memory
@pytest.mark.parametrize("call", ["ls", "get", "put_file", "rm_file"])
def test_a_store_that_fails_is_never_taken_for_an_empty_one(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders, refusing: Refusing, call: str
) -> None:
    batch = mixed()
    before = ledger.get(batch).counts  # type: ignore[union-attr]
    if call == "rm_file":  # asked only where no row failed
        with ledger.redis.pipeline() as pipe:
            for index in (1, 3):
                pipe.setbit(ledger.key(batch, Mark.FAILED), index, 0)
                ledger.mark(pipe, batch, index, Mark.CANCELLED)
            pipe.execute()
        before = ledger.get(batch).counts  # type: ignore[union-attr]
        refusing.refused["put_file"] = 1
    refusing.refused[call] = 1
    with pytest.raises(StoreError, match="for you"):
        sealing.seal(batch, ledger, folders)
    refusing.refused.clear()
    assert ledger.get(batch).counts == before  # type: ignore[union-attr]
    assert sealing.seal(batch, ledger, folders)


@only_memory
def test_leases_are_kept_while_a_transfer_lasts_and_who_lost_his_does_not_wait(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "KEEP_S", 0.001)
    released, kept = threading.Event(), threading.Event()
    store = stores.of(folders)
    monkeypatch.setattr(store, "_put_file", lambda *_: released.wait(20))

    def keep() -> None:
        kept.set()
        released.set()

    store.publish(Path("part"), "b.jsonl", keep)
    assert kept.is_set()
    released.clear()

    def lost() -> None:
        raise Crash

    with pytest.raises(Crash):
        store.publish(Path("part"), "b.jsonl", lost)
    released.set()


@only_memory
def test_rows_are_not_looked_for_where_they_are_not(
    mixed: Callable[..., str], ledger: Ledger, folders: Folders
) -> None:
    """Nor are they taken for lost."""
    batch, elsewhere = mixed(), Folders(folders.root)
    before = ledger.get(batch)
    for act in (sealing.seal, cancelling.cancel, lambda *args: list(sealing.errors(*args))):
        with pytest.raises(StoreError, match=r"has its rows in memory://.*go to batch_outputs/ here"):
            act(batch, ledger, elsewhere)
    assert sealing.seal_ready(ledger, elsewhere) == []
    assert ledger.get(batch) == before
    assert sealing.seal_ready(ledger, folders) == [batch]


# The setting


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/srv/outputs", "an address of one of s3://"),
        ("ftp://host/x", "an address of one of s3://"),
        ("s3://", "it names no place"),
        ("file:///", "it names no place"),
        ("file://here/x", "a path begins with a slash"),
        ("s3://key:hunter2@bucket/x", "no password or option"),
        ("s3://bucket/x?secret=hunter2", "no password or option"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, reason: str
) -> None:
    monkeypatch.setenv("DLLM_OUTPUTS_URL", url)
    with pytest.raises(SettingsError) as error:
        read(WorkerSettings, {"root": tmp_path})
    assert reason in str(error.value)
    assert "hunter2" not in str(error.value)


def test_the_setting_is_that_of_folders_and_of_new_batches(tmp_path: Path) -> None:
    settings = ProducerSettings(root=tmp_path, outputs_url="abfs://container@account.dfs.core.windows.net/x/")
    assert settings.folders.outputs_url == "abfs://container@account.dfs.core.windows.net/x"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(UsageError, match="pip install s3fs"):
        stores.of(Folders(tmp_path, "s3://bucket/x"))


@only_memory
def test_the_doctor_says_that_the_store_cannot_be_used(folders: Folders, refusing: Refusing, redis_url: str) -> None:
    settings = ProducerSettings(root=folders.root, redis_url=redis_url, outputs_url=folders.outputs_url)
    refusing.refused["pipe_file"] = 1
    found = [told for told in doctor.examine(settings, fix=False) if told.kind == "store"]
    assert [told.where for told in found] == [folders.outputs_url]
    assert "no pipe_file for you" in found[0].what
    stores.of(folders).check()
    assert Refusing.store == {}


def test_a_batch_of_the_folder_goes_on_as_ever(tmp_path: Path) -> None:
    assert isinstance(stores.of(Folders(tmp_path), batch_spec()), stores.Disk)
