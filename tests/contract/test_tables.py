"""CSV, Parquet and packed files: the same rows as anywhere, with their places, from any cursor, whatever is wrong."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from contract import tables
from contract.columns import Columns
from contract.jobs import ErrorCode, ErrorRow, PromptJob, shown
from contract.ledger import Cursor
from contract.parser import Parsed

Rows = Callable[..., list[PromptJob | ErrorRow]]
ReadAt = Callable[..., list[Parsed]]


def csv(rows: Rows, content: bytes | str, limit: int = 1 << 16, **columns: Any) -> list[PromptJob | ErrorRow]:
    return rows(content, kind="csv", source="in.csv", limit=limit, columns=Columns(**columns))


def outline(found: list[PromptJob | ErrorRow]) -> list[tuple[int, int, str]]:
    """Index, line, and the prompt or the error's code."""
    return [(row.index, row.line, row.error.code if isinstance(row, ErrorRow) else str(row.prompt)) for row in found]


# CSV


def test_columns_are_prompt_id_parameters_and_metadata(rows: Rows) -> None:
    text = "id,prompt,temperature,seed,topic\na,one,0.5,7,x\nb,two,,,\n"
    first, second = csv(rows, text)
    assert isinstance(first, PromptJob)
    assert isinstance(second, PromptJob)
    assert (first.id, first.prompt, first.line, first.metadata) == ("a", "one", 2, {"topic": "x"})
    assert (first.params.temperature, first.params.seed) == (0.5, 7)
    assert second.params == second.params.model_copy(update={"temperature": 0.0, "seed": None})
    assert second.metadata == {"topic": ""}


def test_a_byte_order_mark_windows_line_ends_and_quoted_line_feeds(rows: Rows) -> None:
    text = '\ufeffprompt,n\r\n"one\r\ntwo, ""three""",1\r\n\r\nfour,2\r\n'
    found = csv(rows, text)
    assert outline(found) == [(0, 2, 'one\ntwo, "three"'), (1, 5, "four")]
    assert [row.metadata["n"] for row in found] == ["1", "2"]


def test_the_delimiter_and_the_columns_can_be_named(rows: Rows) -> None:
    (row,) = csv(rows, "key;question;prompt\n7;why, then?;x\n", delimiter=";", prompt="question", id="key")
    assert (row.id, row.prompt, row.metadata) == ("7", "why, then?", {"prompt": "x"})


def test_messages_and_token_ids_are_json_in_a_cell(rows: Rows) -> None:
    turns = [{"role": "user", "content": "hi"}]
    cell = json.dumps(turns).replace('"', '""')
    found = csv(rows, f'chat\n"{cell}"\n[1\n', messages="chat")
    assert isinstance(found[0], PromptJob)
    assert shown(found[0].asked) == turns
    assert isinstance(found[1], ErrorRow)
    assert "messages must be a list, found text" in found[1].error.message
    (tokens,) = csv(rows, 'prompt_token_ids\n"[1, 2]"\n')
    assert tokens.asked == (1, 2)  # type: ignore[union-attr]


def test_a_template_makes_a_prompt_of_columns(rows: Rows) -> None:
    found = csv(rows, "id,q,lang,prompt\n1,why,en,old\n2,what,,old\n", template="In {lang}: {q}")
    assert found[0].prompt == "In en: why"
    assert found[0].metadata == {"q": "why", "lang": "en", "prompt": "old"}
    assert found[1].prompt == "In : what"


def test_a_template_asks_for_its_fields_in_each_row(rows: Rows) -> None:
    columns = Columns(template="{a} and {b}")
    good, bad = rows('{"a": 1, "b": "x", "id": "g"}\n{"a": 1, "id": "m"}\n', columns=columns)
    assert good.prompt == "1 and x"
    assert isinstance(bad, ErrorRow)
    assert (bad.id, bad.error.code) == ("m", ErrorCode.BAD_ROW)
    assert bad.error.message == "in.jsonl line 2: the template's field 'b' is missing"


WRONG: dict[str, tuple[bytes, ErrorCode, str]] = {
    "too many values": (b"a,b,c", ErrorCode.BAD_ROW, "it has 3 values, the first line names 2 columns"),
    "too few values": (b"a", ErrorCode.BAD_ROW, "it has 1 values"),
    "text after a quote": (b'"a" b,c', ErrorCode.BAD_ROW, "not CSV"),
    "not UTF-8": (b"caf\xe9,c", ErrorCode.BAD_ENCODING, "byte 0xe9 at offset 19 of the file"),
    "not UTF-8, over lines": (b'"caf\xe9\nmore",c', ErrorCode.BAD_ENCODING, "byte 0xe9 at offset 20 of the file"),
    "a zero byte": (b"a\x00,c", ErrorCode.BAD_ENCODING, "UTF-16"),
    "over-long": (b"x" * 500 + b",c", ErrorCode.BAD_ROW, "longer than 200 bytes"),
    "over-long in lines": (b'"' + b"x" * 150 + b"\n" + b"x" * 150 + b'",c', ErrorCode.BAD_ROW, "longer than 200 bytes"),
    "an empty prompt": (b" ,c", ErrorCode.EMPTY_PROMPT, "empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_bad_row_is_one_error_row_with_file_and_line(rows: Rows, what: str) -> None:
    line, code, says = WRONG[what]
    found = csv(rows, b"prompt,id\n" + b"one,1\n" + line + b"\n" + b"two,2\n", limit=200)
    errors = [row for row in found if isinstance(row, ErrorRow)]
    if what != "over-long in lines":  # what follows the place where reading gave up is read as rows of its own
        assert outline(found)[0] == (0, 2, "one")
        assert outline(found)[-1][2] == "two"
        assert len(errors) == 1
    assert errors[0].error.code == code
    assert errors[0].error.message.startswith("in.csv line 3: ")
    assert says in errors[0].error.message


def test_a_quote_that_is_never_closed_is_told_with_the_line_where_it_opens(rows: Rows) -> None:
    found = csv(rows, 'prompt\none\n"two\nthree\n')
    assert outline(found) == [(0, 2, "one"), (1, 3, "bad_row")]
    assert isinstance(found[1], ErrorRow)
    assert "a quote that opens here is never closed" in found[1].error.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("question,b\nx,y\n", "no column is called prompt, messages or prompt_token_ids; there are question, b"),
        ("prompt,b,b\n", "two columns are called 'b'"),
        ("prompt,temprature\n", "column 'temprature': did you mean 'temperature'?"),
        ('"prompt\nx\n', "the line that names the columns cannot be read"),
    ],
)
def test_a_file_without_usable_columns_is_one_error_row(rows: Rows, content: str, says: str) -> None:
    (error,) = csv(rows, content)
    assert isinstance(error, ErrorRow)
    assert (error.error.code, error.line) == (ErrorCode.BAD_FILE, 1)
    assert says in error.error.message


def test_a_named_column_that_is_not_there_is_named_with_the_nearest(rows: Rows) -> None:
    (error,) = csv(rows, "questions,b\nx,y\n", prompt="question")
    assert isinstance(error, ErrorRow)
    assert "no column 'question' (did you mean 'questions'?); there are questions, b" in error.error.message


def test_an_index_without_a_name_is_carried_under_its_number(rows: Rows) -> None:
    (row,) = csv(rows, ",prompt\n0,one\n")
    assert row.metadata == {"column_1": "0"}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"prompt\n", b"prompt\n\n"])
def test_a_csv_without_rows_has_none(rows: Rows, content: bytes) -> None:
    assert csv(rows, content) == []


# From any cursor


def parquet_of(table: dict[str, list[Any]], rows_in_group: int = 3) -> bytes:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(table), sink, row_group_size=rows_in_group)
    return sink.getvalue()


JSONL = b'{"id": "a", "prompt": "1"}\n\nno json\n{"id": "a", "prompt": "2"}\n' + b"x" * 300 + b'\n{"prompt": "3"}'
CSV = b'id,prompt,n\na,"one\ntwo",1\n\na,twice,2\nb,"caf\xe9",3\nc,' + b"x" * 300 + b",4\nd,four\ne,five,5"
TXT = b"one\n\ntwo\n" + b"x" * 300 + b"\nthree\n\n"
SOURCES: dict[str, tuple[bytes, dict[str, Any], int]] = {
    "csv": (CSV, {"kind": "csv"}, 6),
    "csv.gz": (gzip.compress(CSV), {"kind": "csv", "packed": True}, 6),
    "jsonl.gz": (gzip.compress(JSONL), {"kind": "jsonl", "packed": True}, 5),
    "txt.gz": (gzip.compress(TXT), {"kind": "txt", "packed": True}, 4),
    "txt with parameters": (b"# params: {}\n" + TXT, {"kind": "txt", "params_line": True}, 4),
    "two gz in one": (gzip.compress(TXT) + gzip.compress(b"four\n"), {"kind": "txt", "packed": True}, 5),
}


def same_from_every_cursor(parsed: ReadAt, content: bytes, limit: int, values: dict[str, Any]) -> list[Parsed]:
    def shape(found: list[Parsed]) -> list[tuple[object, ...]]:
        return [(each.row.model_dump(exclude={"submitted_at"}), each.cursor) for each in found]

    whole = parsed(content, limit=limit, **values)
    assert [each.cursor.index for each in whole] == list(range(1, len(whole) + 1))
    for done in range(len(whole) + 1):
        cursor = whole[done - 1].cursor if done else Cursor()
        assert shape(parsed(content, cursor, limit=limit, **values)) == shape(whole[done:])
    return whole


@pytest.mark.parametrize("name", SOURCES)
def test_reading_goes_on_from_any_cursor_with_the_same_rows(parsed: ReadAt, name: str) -> None:
    content, values, count = SOURCES[name]
    assert len(same_from_every_cursor(parsed, content, 200, values)) == count


@pytest.mark.parametrize("seed", range(8))
def test_a_random_csv_is_read_as_it_was_written_from_any_cursor(parsed: ReadAt, seed: int) -> None:
    import csv as standard

    chance = random.Random(seed)
    values = ["".join(chance.choices('ab,"\n\r ü', k=chance.randint(1, 12))) + "x" for _ in range(40)]
    sink = io.StringIO(newline="")
    writer = standard.writer(sink, quoting=standard.QUOTE_ALL, lineterminator=chance.choice(["\n", "\r\n"]))
    writer.writerow(["prompt", "note"])
    writer.writerows([value, value] for value in values)
    whole = same_from_every_cursor(parsed, sink.getvalue().encode(), 1 << 16, {"kind": "csv"})
    expected = [value.replace("\r\n", "\n") for value in values]
    assert [each.row.metadata["note"] for each in whole] == expected


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_a_damaged_gz_ends_with_one_error_row(parsed: ReadAt, kind: str, keep: float) -> None:
    chance = random.Random(1)
    lines = [f'{{"prompt": "{chance.random()}"}}' if kind == "jsonl" else str(chance.random()) for _ in range(500)]
    packed = gzip.compress("\n".join(["prompt", *lines] if kind == "csv" else lines).encode())
    content = packed[: int(len(packed) * keep)]
    whole = parsed(content, kind=kind, packed=True)
    last = whole[-1].row
    assert isinstance(last, ErrorRow)
    assert last.error.code == ErrorCode.BAD_FILE
    assert "the .gz is damaged" in last.error.message
    assert all(isinstance(each.row, PromptJob) for each in whole[:-1])
    for done in (0, len(whole) // 2, len(whole) - 1, len(whole)):
        again = parsed(content, whole[done - 1].cursor if done else Cursor(), kind=kind, packed=True)
        assert [each.row.index for each in again] == list(range(done, len(whole)))


def test_what_is_not_gzip_at_all_is_one_error_row(rows: Rows) -> None:
    (error,) = rows(b'{"prompt": "a"}\n', packed=True)
    assert isinstance(error, ErrorRow)
    assert error.error.code == ErrorCode.BAD_FILE


# Parquet


def parquet(rows: Rows, content: bytes, **values: Any) -> list[PromptJob | ErrorRow]:
    return rows(content, kind="parquet", source="in.parquet", **values)


def test_a_parquets_values_become_json(rows: Rows) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    table = {
        "prompt": ["one", "two"],
        "seed": [7, None],
        "when": [when, None],
        "amount": [Decimal("1.50"), None],
        "raw": [b"\xff", None],
        "score": [float("nan"), 0.5],
        "tags": [["x", "y"], []],
    }
    first, second = parquet(rows, parquet_of(table))
    assert isinstance(first, PromptJob)
    assert (first.line, first.params.seed) == (1, 7)
    assert first.metadata == {
        "when": when.isoformat(),
        "amount": "1.50",
        "raw": "/w==",
        "score": None,
        "tags": ["x", "y"],
    }
    assert isinstance(second, PromptJob)
    assert second.params.seed is None
    assert json.loads(second.model_dump_json())["metadata"]["score"] == 0.5


def test_messages_and_token_ids_are_lists_in_a_parquet(rows: Rows) -> None:
    turns = [{"role": "user", "content": "hi"}]
    (row,) = parquet(rows, parquet_of({"chat": [turns]}), columns=Columns(messages="chat"))
    assert shown(row.asked) == turns  # type: ignore[union-attr]
    (row,) = parquet(rows, parquet_of({"prompt_token_ids": [[1, 2]]}))
    assert row.asked == (1, 2)  # type: ignore[union-attr]


def test_rows_of_a_parquet_are_named_by_their_number(rows: Rows) -> None:
    found = parquet(rows, parquet_of({"id": ["a", "b", "a"], "prompt": ["x", None, "y"]}))
    messages = [row.error.message for row in found if isinstance(row, ErrorRow)]
    assert messages[0].startswith("in.parquet row 2: 'prompt', 'messages' or 'prompt_token_ids' is missing")
    assert messages[1] == "in.parquet row 3: id 'a' was used in row 1 already"


def test_a_parquet_goes_on_from_any_cursor_across_its_row_groups(parsed: ReadAt) -> None:
    content = parquet_of({"prompt": [f"p{number}" if number % 5 else "" for number in range(20)]})
    whole = same_from_every_cursor(parsed, content, 1 << 16, {"kind": "parquet"})
    assert len(whole) == 20


def test_a_parquet_without_a_prompt_column_is_one_error_row(rows: Rows) -> None:
    (error,) = parquet(rows, parquet_of({"a": [1]}))
    assert isinstance(error, ErrorRow)
    assert error.error.code == ErrorCode.BAD_FILE
    assert "name one with --prompt-column" in error.error.message


@pytest.mark.parametrize("cut", [0, 10, 400])
def test_a_parquet_that_was_torn_is_one_error_row(rows: Rows, cut: int) -> None:
    content = parquet_of({"prompt": [f"prompt {number}" for number in range(100)]})
    found = parquet(rows, content[:cut] if cut else b"not parquet")
    assert isinstance(found[-1], ErrorRow)
    assert found[-1].error.code == ErrorCode.BAD_FILE
    assert "cannot be read as parquet" in found[-1].error.message


def test_without_pyarrow_the_remedy_is_told(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert not tables.can_read_parquet()
    with pytest.raises(OSError, match=r"pip install 'dllm-batch\[parquet\]'"):
        parquet(rows, b"PAR1")
