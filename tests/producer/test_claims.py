"""Claims: a source belongs to one batch, its output name to it alone, and a crash between two steps is made good."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract import claimed
from contract.claimed import MANIFEST
from contract.errors import UsageError
from contract.ledger import BatchSpec, BatchState, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings
from producer import claims as module
from producer.claims import Claims, Look, checked_name, output_stem, slug
from tests.crashing import Crash


@pytest.fixture
def claims(producer_settings: Callable[..., ProducerSettings], ledger: Ledger) -> Claims:
    return Claims(producer_settings(), ledger)


@pytest.fixture
def drop(folders: Folders) -> Callable[..., Path]:
    def write(name: str = "questions.txt", text: str = "one\n") -> Path:
        (folders.inputs / name).write_text(text)
        return folders.inputs / name

    return write


def take(claims: Claims, file: Path) -> BatchSpec:
    spec = claims.take(file, Look.at(file))
    assert spec is not None
    return spec


def age(folder: Path) -> None:
    """Make a claimed folder look as if nobody had touched it for a long time."""
    for entry in [*folder.iterdir(), folder]:
        os.utime(entry, (0, 0))


def test_a_taken_file_lies_in_its_batchs_folder(claims: Claims, drop: Any, ledger: Ledger, folders: Folders) -> None:
    file = drop()
    spec = take(claims, file)
    assert not file.exists()
    assert (folders.claimed / spec.batch / "questions.txt").read_text() == "one\n"
    assert (spec.kind, spec.output, spec.source) == ("txt", "questions", "questions.txt")
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert batch.state is BatchState.SUBMITTING
    assert claims.pending() == [spec]


def test_the_same_name_again_is_a_batch_of_its_own(claims: Claims, drop: Any) -> None:
    first, second, third = (take(claims, drop()) for _ in range(3))
    assert [spec.output for spec in (first, second, third)] == ["questions", "questions-2", "questions-3"]
    assert len({first.batch, second.batch, third.batch}) == 3


def test_names_that_differ_in_kind_or_case_only_do_not_share_outputs(claims: Claims, drop: Any) -> None:
    outputs = [
        take(claims, drop(name)).output for name in ("a.txt", "a.jsonl", "A.TXT", "caf\u00e9.txt", "cafe\u0301.txt")
    ]
    assert outputs == ["a", "a-2", "A-3", "caf\u00e9", "cafe\u0301-2"]


@pytest.mark.parametrize("end", [".jsonl", ".txt", ".errors.jsonl"])
def test_a_published_file_is_never_another_batchs_name(claims: Claims, drop: Any, folders: Folders, end: str) -> None:
    (folders.outputs / f"questions{end}").write_text("somebody's\n")
    assert take(claims, drop()).output == "questions-2"


def test_a_file_that_changed_since_it_was_looked_at_is_left_and_its_name_is_free_again(
    claims: Claims, drop: Any, folders: Folders
) -> None:
    file = drop()
    look = Look.at(file)
    file.write_text("one\ntwo\n")
    assert claims.take(file, look) is None
    assert file.exists()
    assert list(folders.claimed.iterdir()) == []
    assert take(claims, file).output == "questions"


def test_a_file_that_somebody_else_took_is_no_error(claims: Claims, drop: Any, folders: Folders) -> None:
    file = drop()
    look = Look.at(file)
    file.unlink()
    assert claims.take(file, look) is None
    assert list(folders.claimed.iterdir()) == []


def crash_at(monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> None:
    def die(*_: object, **__: object) -> None:
        raise Crash

    monkeypatch.setattr(target, name, die)


# A crash leaves the file either in the inbox, for the next scan, or in a claimed folder, for the next `pending`.
STEPS: dict[str, tuple[object, str]] = {
    "before the name is reserved": (claimed, "reserve_output"),
    "before the manifest is written": (claimed, "write_manifest"),
    "before the manifest is published": (claimed, "publish"),
    "before the file is renamed": (module.os, "rename"),
    "before the ledger knows": (claimed, "record"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_between_any_two_steps_of_a_claim_is_made_good(
    claims: Claims, drop: Any, folders: Folders, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = drop()
    with monkeypatch.context() as dying:
        crash_at(dying, *STEPS[step])
        with pytest.raises(Crash):
            claims.take(file, Look.at(file))
    found = claims.pending()
    if file.exists():
        assert found == []
        found = [take(claims, file)]
    (spec,) = found
    for folder in folders.claimed.iterdir():
        age(folder)
    assert claims.pending() == [spec]
    assert claims.source(spec).read_text() == "one\n"
    assert [folder.name for folder in folders.claimed.iterdir()] == [spec.batch]


@pytest.mark.parametrize("name", ["write_manifest", "record"])
def test_a_crash_of_a_snapshot_leaves_the_users_file_and_at_most_one_batch(
    claims: Claims, tmp_path: Path, folders: Folders, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.txt"
    file.write_text("one\n")
    with monkeypatch.context() as dying:
        crash_at(dying, claimed, name)
        with pytest.raises(Crash):
            claims.snapshot(file)
    assert file.read_text() == "one\n"
    assert len(claims.pending()) == (1 if name == "record" else 0)


def test_an_adopted_batch_keeps_its_output_name(claims: Claims, drop: Any, ledger: Ledger) -> None:
    spec = take(claims, drop())
    ledger.redis.flushall()
    assert claims.pending() == [spec]
    assert ledger.get(spec.batch) is not None


def test_an_adopted_batch_whose_name_was_taken_meanwhile_gets_another(
    claims: Claims, drop: Any, ledger: Ledger
) -> None:
    spec = take(claims, drop())
    ledger.redis.flushall()
    other = take(claims, drop())
    outputs = {found.batch: found.output for found in claims.pending()}
    assert outputs == {other.batch: "questions", spec.batch: "questions-2"}


def test_an_abandoned_claim_gives_its_name_back(claims: Claims, drop: Any, folders: Folders) -> None:
    file = drop()
    spec = claims._plan(file, None)
    claimed.write_manifest(spec, claims.folders)
    age(folders.claimed / spec.batch)
    assert claims.pending() == []
    assert list(folders.claimed.iterdir()) == []
    assert take(claims, file).output == "questions"


def test_a_young_claim_without_a_source_is_left_to_whoever_makes_it(claims: Claims, drop: Any) -> None:
    spec = claims._plan(drop(), None)
    claimed.write_manifest(spec, claims.folders)
    assert claims.pending() == []
    assert (claims.folders.claimed / spec.batch / MANIFEST).exists()


def test_a_source_that_was_taken_from_a_running_batch_is_asked_for(
    claims: Claims, drop: Any, notices: list[dict[str, Any]]
) -> None:
    spec = take(claims, drop())
    notices.clear()
    claims.source(spec).rename(claims.folders.root / "away.txt")
    assert claims.pending() == claims.pending() == []
    (notice,) = notices
    assert notice["event"] == "source_missing"
    (claims.folders.root / "away.txt").rename(claims.source(spec))
    assert claims.pending() == [spec]


def test_a_manifest_that_cannot_be_read_is_told_once_and_harms_no_other(
    claims: Claims, drop: Any, folders: Folders, notices: list[dict[str, Any]]
) -> None:
    good = take(claims, drop())
    (folders.claimed / "odd").mkdir()
    (folders.claimed / "odd" / MANIFEST).write_text("{}")
    notices.clear()
    assert claims.pending() == claims.pending() == [good]
    (notice,) = notices
    assert notice["event"] == "claim_unreadable"


@pytest.mark.parametrize(
    ("stem", "output"),
    [
        ("plain", "plain"),
        ("with space", "with space"),
        ("..hidden", "hidden"),
        ("a/b\\c\n", "a_b_c_"),
        ("x.errors", "x-errors"),
        ("x.Errors", "x-Errors"),
        ("", "batch"),
        ("ü" * 200, "ü" * 100),
    ],
)
def test_output_names_are_visible_short_and_no_other_batchs_errors(stem: str, output: str) -> None:
    assert output_stem(stem) == output
    assert output_stem(output) == output
    assert checked_name(output) == output


def test_a_name_that_cannot_be_is_refused_with_one_that_can() -> None:
    with pytest.raises(UsageError, match="try 'a_b'"):
        checked_name("a/b")


def test_batch_ids_have_only_letters_that_job_ids_may_have() -> None:
    assert slug("Größe 1.2 (neu)") == "Groe-1-2-neu"
    assert slug("日本") == "batch"
    assert len(slug("x" * 99)) == 40
