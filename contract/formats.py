"""Other forms of a published batch, beside `{name}.jsonl`, which stays the source for a retry.

    csv, parquet    one table, a line for every row of the input in its order, whether answered or not: `{name}.csv`
    openai          OpenAI's batch output and error files: `{name}.openai.jsonl`, `{name}.openai.errors.jsonl`

A form takes rows one at a time and writes them to parts in a folder of its own choosing; who publishes renames them.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal, Protocol
from uuid import uuid4

from contract.errors import DllmError, UsageError
from contract.jobs import RETRIES, ErrorCode, OutputFormat
from contract.ledger import BatchSpec

OUTPUT_ENDS = (
    ".jsonl",
    ".txt",
    ".errors.jsonl",
    ".csv",
    ".parquet",
    ".openai.jsonl",
    ".openai.errors.jsonl",
    ".summary.json",
)
"""All ends that published files may have, after the batch's output name."""
FORM_ENDS: dict[OutputFormat, tuple[str, ...]] = {
    "jsonl": (),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "openai": (".openai.jsonl", ".openai.errors.jsonl"),
}
ROW_GROUP = 10_000
PYARROW = "--output-format parquet needs pyarrow: pip install 'dllm-batch[parquet]'"

# The columns of a table and their types; `metadata` and prompts that are no text as JSON.
COLUMNS: dict[str, Literal["text", "whole", "real"]] = {
    "id": "text",
    "prompt": "text",
    "output": "text",
    "finish_reason": "text",
    "error_code": "text",
    "error_message": "text",
    "prompt_tokens": "whole",
    "completion_tokens": "whole",
    "queued_s": "real",
    "denoise_s": "real",
    "tokens_per_forward": "real",
    "model": "text",
    "worker": "text",
    "metadata": "text",
}

INPUT_AT_FAULT = set(ErrorCode) - {
    *RETRIES,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.WORKER_CRASHED,
    ErrorCode.SOURCE_LOST,
    ErrorCode.CANCELLED,
}
OPENAI_CODES = {ErrorCode.CANCELLED: "batch_cancelled", ErrorCode.DEADLINE_EXCEEDED: "request_timeout"}
"""What OpenAI has a word of its own for."""


class Form(Protocol):
    """A form of the batch under way."""

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        """The next row, an output row or an error row."""

    def close(self) -> None:
        """No more rows come."""

    def files(self) -> Iterator[tuple[str, Path | None]]:
        """After `close`: the end of each published file and its part; None for a file that is not to be there."""


def published_ends(spec: BatchSpec, any_failed: bool) -> list[str]:
    """The ends of the files that a batch's last publishing left; `any_failed` says that rows have no output."""
    ends = {".jsonl", ".summary.json", *FORM_ENDS[spec.output_format]} | ({".txt"} if spec.kind == "txt" else set())
    if not any_failed:
        ends.discard(".openai.errors.jsonl")
    else:
        ends.add(".errors.jsonl")
    return [end for end in OUTPUT_ENDS if end in ends]


def require(form: str) -> None:
    """Raises UsageError where `form` cannot be written on this machine."""
    if form == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError(PYARROW)


@contextlib.contextmanager
def opened(spec: BatchSpec, folder: Path, created: float) -> Iterator[Form]:
    """The form that the batch asks for, its parts in `folder`; `created` is the time that OpenAI's rows are given."""
    part = folder / f".{spec.output_format}.{uuid4().hex}.part"
    form: Form
    if spec.output_format == "csv":
        form = Csv(part)
    elif spec.output_format == "parquet":
        form = Parquet(part)
    elif spec.output_format == "openai":
        form = OpenAI(part, spec.batch, int(created))
    else:
        form = Nothing()
    try:
        yield form
    finally:
        form.close()


class Nothing:
    """`{name}.jsonl` is all that was asked for."""

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

    def files(self) -> Iterator[tuple[str, Path | None]]:
        yield from ()


class Csv:
    """Comma-separated, UTF-8, with a header; what is not there is empty."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self._stream: IO[str] = part.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        self._writer = csv.DictWriter(self._stream, list(COLUMNS), lineterminator="\n")
        self._writer.writeheader()

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        self._writer.writerow(record(row))

    def close(self) -> None:
        self._stream.close()

    def files(self) -> Iterator[tuple[str, Path | None]]:
        yield ".csv", self._part


class Parquet:
    """The same table, typed; `ROW_GROUP` rows are in memory."""

    def __init__(self, part: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DllmError(PYARROW) from None
        kinds = {"text": pyarrow.string(), "whole": pyarrow.int64(), "real": pyarrow.float64()}
        self._part = part
        self._table = pyarrow.Table
        self._schema = pyarrow.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])
        self._writer = pyarrow.parquet.ParquetWriter(str(part), self._schema)
        self._rows: list[dict[str, Any]] = []

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        self._rows.append({name: _valid(value) for name, value in record(row).items()})
        if len(self._rows) >= ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def files(self) -> Iterator[tuple[str, Path | None]]:
        yield ".parquet", self._part

    def _flush(self) -> None:
        if self._rows:
            rows, self._rows = self._rows, []
            self._writer.write_table(self._table.from_pylist(rows, schema=self._schema))


class OpenAI:
    """Rows as OpenAI's Batch API returns them: `chat.completion` for conversations, `text_completion` for the rest.

    What the input was at fault for is an answer with status 400, as it would be there; other failures have no answer
    and an `error`. Ids follow from batch and row, so that publishing again gives the same ones.
    """

    def __init__(self, part: Path, batch: str, created: int) -> None:
        self._parts = (part, part.with_suffix(".errors.part"))
        self._outputs, self._errors = (one.open("wb") for one in self._parts)
        self._batch = batch
        self._created = created
        self._failed = False

    def add(self, index: int, row: Mapping[str, Any]) -> None:
        key = blake2b(f"{self._batch}-{index}".encode(), digest_size=12).hexdigest()
        if "output" in row:
            response = {"status_code": 200, "request_id": f"req_{key}", "body": _body(row, key, self._created)}
            line = {"id": f"batch_req_{key}", "custom_id": row["id"], "response": response, "error": None}
        else:
            self._failed = True
            line = {"id": f"batch_req_{key}", "custom_id": row["id"], **_failure(row["error"], key)}
        (self._outputs if "output" in row else self._errors).write(_json_line(line))

    def close(self) -> None:
        self._outputs.close()
        self._errors.close()

    def files(self) -> Iterator[tuple[str, Path | None]]:
        yield ".openai.errors.jsonl", self._parts[1] if self._failed else None
        yield ".openai.jsonl", self._parts[0]


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as a line of a table; None where it has no value."""
    error, usage = row.get("error") or {}, row.get("usage") or {}
    timing, denoise = row.get("timing") or {}, row.get("denoise") or {}
    return {
        "id": row["id"],
        "prompt": _text(row.get("prompt")),
        "output": row.get("output"),
        "finish_reason": row.get("finish_reason"),
        "error_code": error.get("code"),
        "error_message": error.get("message"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "queued_s": timing.get("queued_s"),
        "denoise_s": timing.get("denoise_s"),
        "tokens_per_forward": denoise.get("tokens_per_forward"),
        "model": row.get("model"),
        "worker": row.get("worker"),
        "metadata": _text(row.get("metadata") or None),
    }


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _valid(value: Any) -> Any:
    """Half a surrogate pair has no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _body(row: Mapping[str, Any], key: str, created: int) -> dict[str, Any]:
    """The answer as `/v1/chat/completions` or `/v1/completions` gives it."""
    chat = _is_conversation(row.get("prompt"))
    told: dict[str, Any] = {"text": row["output"]}
    if chat:
        told = {"message": {"role": "assistant", "content": row["output"], "refusal": None}}
    usage = row["usage"]
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": row["model"],
        "choices": [{"index": 0, **told, "logprobs": None, "finish_reason": row["finish_reason"]}],
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
        },
        "system_fingerprint": None,
    }


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _failure(error: Mapping[str, Any], key: str) -> dict[str, Any]:
    code, message = error["code"], error["message"]
    if code in INPUT_AT_FAULT:
        told = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        response = {"status_code": 400, "request_id": f"req_{key}", "body": {"error": told}}
        return {"response": response, "error": None}
    return {"response": None, "error": {"code": OPENAI_CODES.get(code, code), "message": message}}


def _json_line(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair has no UTF-8, but a JSON escape
        return json.dumps(document).encode() + b"\n"
