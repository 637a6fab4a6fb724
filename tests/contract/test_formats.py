"""A published batch in the forms that other tools read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract import formats, sealing
from contract.errors import DllmError, UsageError
from contract.jobs import Completion, ErrorCode, Row
from contract.ledger import BatchState, Ledger, Mark
from contract.paths import Folders
from contract.segments import SegmentWriter
from tests.conftest import completion_row, failure_row

TURNS = [{"role": "user", "content": "Hi"}]
Publish = Callable[..., str]


@pytest.fixture
def published(submit: Callable[..., str], ledger: Ledger, folders: Folders) -> Publish:
    """Publish a batch of these rows, all of which ended, in a form."""

    def seal(form: str, *rows: Row) -> str:
        batch = submit(len(rows), output_format=form, created_at=1000.5)
        with SegmentWriter(folders, batch, "w") as segment, ledger.redis.pipeline() as pipe:
            segment.append(rows)
            for row in rows:
                ledger.mark(pipe, batch, row.index, mark_of(row))
            pipe.execute()
        assert sealing.seal(batch, ledger, folders)
        return batch

    return seal


def mark_of(row: Row) -> Mark:
    if isinstance(row, Completion):
        return Mark.DONE
    return Mark.CANCELLED if row.error.code is ErrorCode.CANCELLED else Mark.FAILED


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_table_has_a_line_for_every_row_in_input_order(published: Publish, folders: Folders) -> None:
    odd = 'two\nlines, "quoted", é and \ud800'
    published("csv", completion_row(0, odd), failure_row(1), completion_row(2, prompt=TURNS))
    with (folders.outputs / "b.csv").open(newline="", encoding="utf-8") as stream:
        first, second, third = csv.DictReader(stream)
    assert list(first) == list(formats.COLUMNS)
    assert first["output"] == odd.replace("\ud800", r"\ud800")
    assert (first["id"], first["prompt"], first["finish_reason"]) == ("id-0", "prompt 0", "stop")
    assert (first["prompt_tokens"], first["completion_tokens"], first["queued_s"]) == ("3", "2", "0.1")
    assert (first["error_code"], first["metadata"]) == ("", "")
    assert (second["output"], second["error_code"], second["error_message"]) == ("", "model_error", "it failed")
    assert json.loads(third["prompt"]) == TURNS
    assert (folders.outputs / "b.jsonl").exists()


def test_metadata_of_a_row_is_a_column() -> None:
    row = {"id": "a", "output": "x", "metadata": {"page": 3}}
    assert json.loads(formats.record(row)["metadata"]) == {"page": 3}


def test_parquet_is_the_same_table_typed(published: Publish, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="pyarrow is not installed: pip install 'dllm-batch[parquet]'"
    )
    monkeypatch.setattr(formats, "ROW_GROUP", 2)
    published("parquet", completion_row(0), failure_row(1), completion_row(2, "half a pair: \ud800"))
    table = parquet.read_table(folders.outputs / "b.parquet")
    assert table.column_names == list(formats.COLUMNS)
    first, second, third = table.to_pylist()
    assert (first["output"], first["completion_tokens"], first["queued_s"]) == ("output 0", 2, 0.1)
    assert (second["output"], second["error_code"], second["completion_tokens"]) == (None, "model_error", None)
    assert third["output"] == r"half a pair: \ud800"


def test_parquet_without_pyarrow_is_refused_with_the_remedy_and_a_batch_waits_for_it(
    submit: Callable[..., str], ledger: Ledger, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'dllm-batch\[parquet\]'"):
        formats.require("parquet")
    formats.require("csv")
    batch = submit(0, output_format="parquet")
    with pytest.raises(DllmError, match="needs pyarrow"):
        sealing.seal(batch, ledger, folders)
    found = ledger.get(batch)
    assert found is not None
    assert found.state is BatchState.RUNNING
    assert not (folders.outputs / "b.jsonl").exists()


def test_openai_outputs_have_its_form_field_by_field(published: Publish, folders: Folders) -> None:
    published("openai", completion_row(0, "2 + 2 = 4.", prompt=TURNS), completion_row(1, finish_reason="length"))
    chat, text = lines(folders.outputs / "b.openai.jsonl")
    assert list(chat) == ["id", "custom_id", "response", "error"]
    assert (chat["custom_id"], chat["error"]) == ("id-0", None)
    assert chat["id"].startswith("batch_req_")
    assert list(chat["response"]) == ["status_code", "request_id", "body"]
    assert chat["response"]["status_code"] == 200
    assert chat["response"]["request_id"].startswith("req_")
    body = chat["response"]["body"]
    assert body.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "2 + 2 = 4.", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "created": 1000,
        "model": "demo",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "system_fingerprint": None,
    }
    body = text["response"]["body"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert body["choices"] == [{"index": 0, "text": "output 1", "logprobs": None, "finish_reason": "length"}]
    assert chat["id"] != text["id"]
    assert not (folders.outputs / "b.openai.errors.jsonl").exists()


def test_openai_errors_are_answers_of_400_where_the_input_was_at_fault_and_errors_elsewhere(
    published: Publish, folders: Folders
) -> None:
    codes = [ErrorCode.BAD_PARAMS, ErrorCode.MODEL_ERROR, ErrorCode.CANCELLED, ErrorCode.DEADLINE_EXCEEDED]
    published("openai", *(failure_row(index, code=code) for index, code in enumerate(codes)))
    bad, *others = lines(folders.outputs / "b.openai.errors.jsonl")
    assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("id-0", None, 400)
    told = {"message": "it failed", "type": "invalid_request_error", "param": None, "code": "bad_params"}
    assert bad["response"]["body"] == {"error": told}
    assert [one["response"] for one in others] == [None, None, None]
    assert [one["error"]["code"] for one in others] == ["model_error", "batch_cancelled", "request_timeout"]
    assert others[0]["error"]["message"] == "it failed"
    assert (folders.outputs / "b.openai.jsonl").read_bytes() == b""


def test_every_error_code_is_told_apart() -> None:
    assert {ErrorCode.BAD_JSON, ErrorCode.PROMPT_TOO_LONG, ErrorCode.UNKNOWN_MODEL} <= formats.INPUT_AT_FAULT
    assert not {ErrorCode.OUT_OF_MEMORY, ErrorCode.WORKER_CRASHED, ErrorCode.CANCELLED} & formats.INPUT_AT_FAULT


def test_jsonl_alone_adds_nothing(published: Publish, folders: Folders) -> None:
    published("jsonl", completion_row(0))
    names = sorted(file.name for file in folders.outputs.iterdir() if file.is_file())
    assert names == ["b.jsonl", "b.summary.json"]
