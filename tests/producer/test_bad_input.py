"""Bad input costs one row or one file, never the batch: what is wrong, where, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.errors import DllmError
from contract.jobs import ErrorCode, ErrorRow, PromptJob
from contract.ledger import BatchSpec, BatchState, Ledger
from contract.paths import Folders
from producer.claims import copy_some
from producer.inbox import Inbox

GOOD = b'{"prompt": "good"}'
FIRST = b'{"id": "first", "prompt": "good"}'
Rows = Callable[..., list[PromptJob | ErrorRow]]


def only_error(found: list[PromptJob | ErrorRow]) -> ErrorRow:
    (error,) = (row for row in found if isinstance(row, ErrorRow))
    return error


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_a_file_without_prompts_has_no_rows(rows: Rows, content: bytes, kind: str) -> None:
    assert rows(content, kind=kind) == []


def test_an_empty_file_is_published_as_an_empty_output_with_a_notice(
    submit_file: Any, ledger: Ledger, folders: Folders, tmp_path: Path, notices: list[dict[str, Any]]
) -> None:
    file = tmp_path / "empty.jsonl"
    file.touch()
    spec, _ = submit_file(file)
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert batch.state is BatchState.DONE
    assert (folders.outputs / "empty.jsonl").read_bytes() == b""
    (notice,) = (event for event in notices if event["log_level"] == "warning")
    assert notice["event"] == "batch_empty"
    assert notice["file"] == "empty.jsonl"


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_prompts(rows: Rows) -> None:
    content = b'\xef\xbb\xbf{"id": "a", "prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n'
    assert [(row.id, row.line, row.prompt) for row in rows(content)] == [("a", 1, "one"), ("1", 3, "two")]
    assert [row.prompt for row in rows(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n", kind="txt")] == ["one", "two"]


WRONG: dict[str, tuple[bytes, ErrorCode, str]] = {
    "not UTF-8": (b'{"prompt": "caf\xe9"}', ErrorCode.BAD_ENCODING, "byte 0xe9 at offset 49 of the file is not UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16-le"), ErrorCode.BAD_ENCODING, "is the file UTF-16?"),
    "not JSON": (b'{"prompt": "good"', ErrorCode.BAD_JSON, "not JSON: Expecting ',' delimiter at column 18"),
    "a list": (b'["good"]', ErrorCode.BAD_ROW, "expected a JSON object, found a list"),
    "a number": (b"3", ErrorCode.BAD_ROW, "expected a JSON object, found a number"),
    "no prompt": (b'{"id": "x"}', ErrorCode.BAD_ROW, "'prompt', 'messages' or 'prompt_token_ids' is missing"),
    "an empty prompt": (b'{"prompt": ""}', ErrorCode.EMPTY_PROMPT, "the prompt is empty"),
    "an unknown key": (b'{"prompt": "a", "temprature": 1}', ErrorCode.BAD_PARAMS, "did you mean 'temperature'?"),
    "an unknown parameter": (
        b'{"prompt": "a", "params": {"max_new_token": 1}}',
        ErrorCode.BAD_PARAMS,
        "unknown parameter 'max_new_token' (did you mean 'max_new_tokens'?)",
    ),
    "out of range": (b'{"prompt": "a", "top_p": 2}', ErrorCode.BAD_PARAMS, "top_p: Input should be less than or equal"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', ErrorCode.BAD_PARAMS, "temperature"),
    "a boolean": (b'{"prompt": "a", "seed": true}', ErrorCode.BAD_PARAMS, "seed must be a number, not true"),
    "a duplicate": (b'{"id": "first", "prompt": "a"}', ErrorCode.DUPLICATE_ID, "id 'first' was used on line 1 already"),
    "another model": (b'{"prompt": "a", "model": "llada"}', ErrorCode.UNKNOWN_MODEL, "submit it in a file of its own"),
    "over-long": (b'{"prompt": "' + b"x" * 2000 + b'"}', ErrorCode.BAD_ROW, "longer than 1,000 bytes: split it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_line_is_one_error_row_with_file_and_line(rows: Rows, what: str) -> None:
    line, code, says = WRONG[what]
    found = rows(FIRST + b"\n" + line + b"\n" + GOOD + b"\n", limit=1000)
    assert [row.index for row in found] == [0, 1, 2]
    error = only_error(found)
    assert (error.index, error.line, error.error.code) == (1, 2, code)
    assert error.error.message.startswith("in.jsonl line 2: ")
    assert says in error.error.message


@pytest.mark.parametrize(
    ("line", "code"),
    [(b"caf\xe9", ErrorCode.BAD_ENCODING), (b"a\x00b", ErrorCode.BAD_ENCODING), (b"x" * 200, ErrorCode.BAD_ROW)],
)
def test_a_bad_line_of_a_txt_is_one_error_row(rows: Rows, line: bytes, code: ErrorCode) -> None:
    found = rows(b"one\n" + line + b"\ntwo\n", kind="txt", source="in.txt", limit=100)
    assert [row.prompt for row in found] == ["one", None, "two"]
    error = only_error(found)
    assert error.error.code == code
    assert error.error.message.startswith("in.txt line 2: ")


def test_the_id_of_a_bad_row_is_kept_where_it_can_be_read(rows: Rows) -> None:
    assert only_error(rows('{"id": "mine", "prompt": 3}')).id == "mine"


def test_the_prompt_of_a_row_with_bad_parameters_is_kept(rows: Rows) -> None:
    assert only_error(rows('{"prompt": "mine", "top_k": -1}')).prompt == "mine"


def test_all_good_rows_of_a_bad_file_are_submitted(
    submit_file: Any, queued: Callable[..., list[PromptJob]], ledger: Ledger, tmp_path: Path
) -> None:
    file = tmp_path / "mixed.jsonl"
    lines = [line for line, _, _ in WRONG.values()]
    file.write_bytes(FIRST + b"\n" + b"\n".join(b"\n".join([line, GOOD]) for line in lines))
    spec, errors = submit_file(file, max_line_mb=1)
    wanted = [code for what, (_, code, _) in WRONG.items() if what != "over-long"]  # it fits into a megabyte
    assert [error.error.code for error in errors] == wanted
    jobs = queued()
    assert sorted([job.index for job in jobs] + [error.index for error in errors]) == list(range(2 * len(WRONG) + 1))
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert (batch.counts.total, batch.counts.failed) == (2 * len(WRONG) + 1, len(errors))


# Things in the inbox that are not input


@pytest.fixture
def inbox(folders: Folders) -> Inbox:
    return Inbox(folders.inputs, settle_s=0.0)


def make_folder(file: Path) -> None:
    file.mkdir()


def make_link(file: Path) -> None:
    (file.parent.parent / "elsewhere.txt").write_text("not yours\n")
    file.symlink_to(file.parent.parent / "elsewhere.txt")


def make_dead_link(file: Path) -> None:
    file.symlink_to("nowhere.txt")


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_folder, "a folder; put its files here"),
        (make_link, "a link; put the file itself here"),
        (make_dead_link, "a link"),
        (make_pipe, "not a regular file"),
    ],
)
def test_what_is_only_named_like_input_is_left_alone_with_one_notice(
    inbox: Inbox, notices: list[dict[str, Any]], make: Callable[[Path], None], says: str
) -> None:
    make(inbox.folder / "x.txt")
    assert inbox.look() == inbox.look() == []
    (notice,) = notices
    assert says in notice["reason"]
    assert notice["file"] == "x.txt"
    assert os.path.lexists(inbox.folder / "x.txt")


def test_a_cause_that_comes_back_is_told_again(inbox: Inbox, notices: list[dict[str, Any]]) -> None:
    for _ in range(2):
        (inbox.folder / "x.txt").mkdir()
        inbox.look()
        (inbox.folder / "x.txt").rmdir()
        inbox.look()
    assert len(notices) == 2


def test_other_kinds_of_files_are_named_with_the_kinds_that_are_read(
    inbox: Inbox, notices: list[dict[str, Any]]
) -> None:
    (inbox.folder / "table.xlsx").write_text("a,b\n")
    assert inbox.look() == []
    assert ".txt, .jsonl, .csv and .parquet" in notices[0]["reason"]


def test_a_name_that_is_not_utf8_is_left_alone(inbox: Inbox, notices: list[dict[str, Any]]) -> None:
    (Path(os.fsdecode(os.fsencode(inbox.folder) + b"/caf\xe9.txt"))).write_text("a\n")
    assert inbox.look() == []
    assert "not UTF-8" in notices[0]["reason"]
    assert notices[0]["file"] == r"caf\xe9.txt"


@pytest.mark.parametrize("name", [".x.txt", "#x.txt", "x.txt~", "x.txt.part", "x.txt.swp", "x.TMP", "x.crdownload"])
def test_unfinished_files_are_passed_over_in_silence(inbox: Inbox, notices: list[dict[str, Any]], name: str) -> None:
    (inbox.folder / name).write_text("a\n")
    assert inbox.look() == []
    assert notices == []


def test_the_case_of_the_suffix_makes_no_difference(inbox: Inbox) -> None:
    (inbox.folder / "x.JSONL").touch()
    assert [file.name for file, _ in inbox.look()] == ["x.JSONL"]


def test_a_file_that_grows_is_not_ready_until_it_stands_still(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("producer.inbox.time.monotonic", lambda: now[0])
    inbox = Inbox(folders.inputs, settle_s=1.0)
    file = folders.inputs / "slow.txt"
    for _ in range(5):
        with file.open("a") as stream:
            stream.write("more\n")
        assert inbox.look() == []
        assert inbox.unsettled
        now[0] += 0.9
    assert inbox.look() == []
    now[0] += 0.2
    assert [found.name for found, _ in inbox.look()] == ["slow.txt"]


def test_a_folder_for_inputs_that_is_gone_is_made_again(inbox: Inbox) -> None:
    (inbox.folder / ".claimed").rmdir()
    inbox.folder.rmdir()
    assert inbox.look() == []
    assert inbox.folder.is_dir()


def test_a_line_beyond_memory_is_passed_over_piece_by_piece(tmp_path: Path, submit_file: Any, queued: Any) -> None:
    file = tmp_path / "long.txt"
    with file.open("wb") as stream:
        stream.write(b"one\n")
        stream.write(b"x" * (3 << 20))
        stream.write(b"\ntwo\n")
    spec, errors = submit_file(file, max_line_mb=1)
    assert [job.prompt for job in queued()] == ["one", "two"]
    (error,) = errors
    assert error.error.message == f"{spec.source} line 2: longer than 1,048,576 bytes: split it, or raise max_line_mb"


def test_a_file_that_is_written_while_it_is_copied_is_refused(
    tmp_path: Path,
    submit_file: Callable[..., tuple[BatchSpec, list[ErrorRow]]],
    folders: Folders,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "growing.txt"
    file.write_text("line\n")

    def written_on(source: Path, target: Path, most: int) -> int:
        with source.open("a") as stream:
            stream.write("line\n")
        return copy_some(source, target, most)

    monkeypatch.setattr("producer.claims.copy_some", written_on)
    with pytest.raises(DllmError, match="is being written: submit it when it is complete"):
        submit_file(file)
    assert list(folders.claimed.iterdir()) == []
    assert ledger.newest() == []
