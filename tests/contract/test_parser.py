"""Sources as streams of rows: order, places, parameters, and going on from any cursor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.columns import Columns
from contract.jobs import ErrorRow, PromptJob, shown
from contract.ledger import Cursor
from contract.parser import Parsed
from contract.sampling import SamplingParams

Rows = Callable[..., list[PromptJob | ErrorRow]]


def prompts(found: list[PromptJob | ErrorRow]) -> list[str | None]:
    return [row.prompt for row in found if isinstance(row, PromptJob)]


def test_jsonl_rows_keep_their_order_ids_and_lines(rows: Rows) -> None:
    found = rows('{"id": "a", "prompt": "one"}\n{"prompt": "two"}\n')
    assert [(row.index, row.line, row.id) for row in found] == [(0, 1, "a"), (1, 2, "1")]
    assert prompts(found) == ["one", "two"]


def test_other_keys_travel_with_jobs_and_error_rows(rows: Rows) -> None:
    job, error = rows('{"prompt": "a", "topic": "x", "n": 1.5}\n{"prompt": "b", "topic": "y", "seed": -1}\n')
    assert job.metadata == {"topic": "x", "n": 1.5}
    assert isinstance(job, PromptJob)
    assert PromptJob.model_validate_json(job.model_dump_json(exclude_defaults=True)) == job
    assert isinstance(error, ErrorRow)
    assert error.metadata == {"topic": "y"}


def test_a_key_that_looks_mistyped_is_an_error_row_that_keeps_the_others(rows: Rows) -> None:
    (error,) = rows('{"prompt": "a", "topic": "x", "temprature": 1}\n')
    assert isinstance(error, ErrorRow)
    assert "did you mean 'temperature'?" in error.error.message
    assert error.metadata["topic"] == "x"


def test_token_ids_travel_as_they_are(rows: Rows) -> None:
    (job,) = rows('{"prompt_token_ids": [5, 0, 7], "truncate": "left"}\n')
    assert isinstance(job, PromptJob)
    assert job.asked == (5, 0, 7)
    assert shown(job.asked) == [5, 0, 7]
    assert job.params.truncate == "left"
    assert PromptJob.model_validate_json(job.model_dump_json(exclude_defaults=True)) == job


def test_a_row_lays_its_parameters_over_the_batchs(rows: Rows) -> None:
    base = SamplingParams(max_new_tokens=10, temperature=0.5)
    plain, own = rows('{"prompt": "a"}\n{"prompt": "b", "max_tokens": 20, "seed": 1}', params=base)
    assert isinstance(plain, PromptJob)
    assert isinstance(own, PromptJob)
    assert plain.params == base
    assert (own.params.max_new_tokens, own.params.temperature, own.params.seed) == (20, 0.5, 1)


def test_openai_batch_rows_become_jobs(rows: Rows) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    row = {"custom_id": "c-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (job,) = rows(json.dumps(row))
    assert isinstance(job, PromptJob)
    assert job.id == "c-1"
    assert job.prompt is None
    assert shown(job.asked) == body["messages"]
    assert job.params.max_new_tokens == 5


def test_every_line_of_a_txt_is_a_prompt(rows: Rows) -> None:
    found = rows("one\n\n  two  \n \nthree", kind="txt")
    assert prompts(found) == ["one", "  two  ", "three"]
    assert [(row.index, row.line, row.id) for row in found] == [(0, 1, "0"), (1, 3, "1"), (2, 5, "2")]


def test_only_line_feeds_end_a_line(rows: Rows) -> None:
    assert prompts(rows("a\u2028b\x0bc\x85d\n", kind="txt")) == ["a\u2028b\x0bc\x85d"]


def test_a_whole_txt_can_be_one_prompt(rows: Rows) -> None:
    found = rows("\ufeffone\r\ntwo\n\n", kind="txt", txt_mode="file")
    assert prompts(found) == ["one\ntwo"]
    assert found[0].line == 1


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_whole_txt_of_white_space_is_no_prompt(rows: Rows, content: str) -> None:
    assert rows(content, kind="txt", txt_mode="file") == []


@pytest.mark.parametrize("mode", ["lines", "file"])
def test_a_first_line_of_parameters_is_no_prompt(rows: Rows, mode: str) -> None:
    text = "\ufeff# params: {seed: 1}\none\n"
    (job,) = rows(text, kind="txt", txt_mode=mode, params_line=True)
    assert (job.prompt, job.line, job.index) == ("one", 2, 0)


def test_a_template_takes_the_lines_of_a_txt(rows: Rows) -> None:
    columns = Columns(template="Q: {prompt}\nA:")
    assert prompts(rows("one\n\ntwo\n", kind="txt", columns=columns)) == ["Q: one\nA:", "Q: two\nA:"]


def test_a_whole_txt_beyond_the_limit_is_one_error_row(rows: Rows) -> None:
    (row,) = rows("x" * 101, kind="txt", txt_mode="file", limit=100)
    assert isinstance(row, ErrorRow)
    assert "longer than 100 bytes" in row.error.message


def test_the_last_line_needs_no_line_feed(rows: Rows) -> None:
    assert prompts(rows('{"prompt": "a"}')) == ["a"]


SOURCES = {
    "jsonl": '\ufeff{"id": "a", "prompt": "1"}\r\n\nnot json\n{"id": "a", "prompt": "2"}\n'
    + f'{{"prompt": "{"x" * 300}"}}\n'
    + '{"id": "b", "prompt": "3"}\n{"id": "b", "prompt": "4"}',
    "txt": "\ufeffone\r\n\ntwo\n" + "x" * 300 + "\nthree\n\n",
}


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_reading_goes_on_from_any_cursor_with_the_same_rows(parsed: Callable[..., list[Parsed]], kind: str) -> None:
    def shape(found: list[Parsed]) -> list[tuple[object, ...]]:
        return [(each.row.model_dump(exclude={"submitted_at"}), each.cursor) for each in found]

    whole = parsed(SOURCES[kind], kind=kind, limit=200)
    assert len(whole) == {"jsonl": 6, "txt": 4}[kind]
    for done in range(len(whole) + 1):
        cursor = whole[done - 1].cursor if done else Cursor()
        assert shape(parsed(SOURCES[kind], cursor, limit=200, kind=kind)) == shape(whole[done:])


def test_a_whole_txt_is_not_read_twice(parsed: Callable[..., list[Parsed]]) -> None:
    (only,) = parsed("text", kind="txt", txt_mode="file")
    assert parsed("text", only.cursor, kind="txt", txt_mode="file") == []


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "jobs", "errors"),
    [("plain.jsonl", 6, 0), ("openai_batch.jsonl", 6, 0), ("questions.txt", 6, 0), ("broken.jsonl", 4, 2)],
)
def test_the_examples_are_what_they_claim_to_be(rows: Rows, name: str, jobs: int, errors: int) -> None:
    found = rows((EXAMPLES / name).read_bytes(), kind=name.rsplit(".", 1)[1], source=name)
    assert sum(isinstance(row, PromptJob) for row in found) == jobs
    assert sum(isinstance(row, ErrorRow) for row in found) == errors
