"""A source file as a stream of prompt jobs and error rows, each with the cursor behind it.

Second stage of a prompt's life: the file is claimed, the producer submits what comes out here, and `contract.auditing`
reads it once more for rows that were lost. Holds one line at a time, whatever the file's size, and can go on from any
cursor with exactly the same rows. Must not know Redis: what a bad line costs is one error row, never the batch.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from contract import rows
from contract.errors import BadPrompt
from contract.jobs import ErrorCode, ErrorDetail, ErrorRow, Message, Prompt, PromptJob, shown
from contract.ledger import BatchSpec, Cursor
from contract.lines import BOM, TORN_GZIP, Line, Tick, lines, too_long, torn, unpacked
from contract.sampling import SamplingParams, parse_params
from contract.tables import Record, records

SEEN_CACHE_KB = 32 * 1024


@dataclass(frozen=True)
class Parsed:
    """One row of the source and where reading goes on after it."""

    row: PromptJob | ErrorRow
    cursor: Cursor


def parse(
    stream: BinaryIO,
    spec: BatchSpec,
    cursor: Cursor,
    max_line_bytes: int,
    tick: Tick = lambda: None,
) -> Generator[Parsed, None, None]:
    """The rows of `stream` (seekable) from `cursor` on, in order.

    `tick` is called at least once a line, also while earlier lines are read again: it may raise to end the reading.
    Raises OSError when the disk fails, or for a `.parquet` where pyarrow is not installed.
    """
    if spec.packed:
        stream = unpacked(stream)
    if spec.kind != "txt":
        return _parse_table(stream, spec, cursor, max_line_bytes, tick)
    if spec.txt_mode == "file":
        return _parse_file(stream, spec, cursor, max_line_bytes)
    return _parse_txt(stream, spec, cursor, max_line_bytes, tick)


def _parse_txt(
    stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int, tick: Tick
) -> Generator[Parsed, None, None]:
    """Goes on at the cursor's line; a `.gz` is read from its start, and rows up to the cursor are passed over."""
    start = Cursor() if spec.packed else cursor
    index = start.index
    for line in lines(stream, start, limit, tick):
        if spec.params_line and line.number == 1:
            continue
        row = _txt_row(line, index, spec)
        if row is None:
            continue
        index += 1
        if row.index >= cursor.index:
            yield Parsed(row, Cursor(offset=line.end, line=line.number + 1, index=index))


def _txt_row(line: Line, index: int, spec: BatchSpec) -> PromptJob | ErrorRow | None:
    """The row of a line, or of a whole file; None when it is nothing but white space."""
    try:
        prompt = rows.text(line.raw, line.offset).replace("\r\n", "\n").rstrip("\n")
        if not prompt.strip():
            return None
        if spec.columns.template is not None:
            prompt = spec.columns.fill({"prompt": prompt})
    except BadPrompt as error:
        return _error(spec, Draft(line.number, str(index), {}), index, None, error)
    return _job(spec, Draft(line.number, str(index), {}), index, prompt, spec.params)


def _parse_file(stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int) -> Generator[Parsed, None, None]:
    """The whole file as one prompt."""
    if cursor.index:
        return
    row = _txt_row(_whole_file(stream, spec, limit), 0, spec)
    if row is not None:
        yield Parsed(row, Cursor(offset=stream.tell(), line=2, index=1))


def _whole_file(stream: BinaryIO, spec: BatchSpec, limit: int) -> Line:
    try:
        stream.seek(0)
        first = len(stream.readline(limit)) if spec.params_line else 0
        raw = stream.read(limit + len(BOM) + 1)
    except TORN_GZIP as error:
        return Line(1, 0, 0, b"", torn(error))
    content = raw if first else raw.removeprefix(BOM)
    offset = first + len(raw) - len(content)
    fits = len(content) <= limit
    return Line(1 + spec.params_line, offset, first + len(raw), content, None if fits else too_long(limit))


def _parse_table(
    stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int, tick: Tick
) -> Generator[Parsed, None, None]:
    """Always reads from the start: ids before the cursor must be known to tell a duplicate after it."""
    with SeenIds() as seen:
        for index, record in enumerate(records(stream, spec, limit, tick)):
            draft = Draft.read(record, index, spec)
            twin = seen.add(draft.id, record.line)
            if index >= cursor.index:
                end = Cursor(offset=record.end, line=record.next_line, index=index + 1)
                yield Parsed(draft.finished(spec, index, twin), end)


@dataclass(frozen=True)
class Draft:
    """A row of which the id is known; `fields` as in the source, `row` under our own keys, `error` if it has none."""

    line: int
    id: str
    row: rows.Row
    fields: rows.Row | None = None
    error: BadPrompt | None = None

    @staticmethod
    def read(record: Record, index: int, spec: BatchSpec) -> Draft:
        """Enough of the row to name it: the user's id, else the index."""
        row = rows.arrange(record.fields, spec.columns)
        if spec.kind == "csv":
            row = rows.from_cells(row)
        try:
            if record.error is not None:
                raise record.error
            return Draft(record.line, rows.row_id(row) or str(index), row, record.fields)
        except BadPrompt as error:
            return Draft(record.line, str(index), row, record.fields, error)

    def finished(self, spec: BatchSpec, index: int, twin: int | None) -> PromptJob | ErrorRow:
        """The finished row; `twin` is the line that used the same id before."""
        prompt: Prompt | None = None
        metadata: rows.Row = {}
        try:
            if self.error is not None:
                raise self.error
            metadata = rows.metadata(self.row)
            request = rows.body(self.row)
            prompt = rows.prompt(self._filled(request, spec))
            rows.refuse_mistaken(self.row)
            self._refuse(spec, twin, rows.model(request))
            asked = rows.parameters(request)
            params = parse_params(asked, spec.params) if asked else spec.params
            return _job(spec, self, index, prompt, params, metadata)
        except BadPrompt as error:
            return _error(spec, self, index, prompt, error, metadata)

    def _filled(self, request: rows.Row, spec: BatchSpec) -> rows.Row:
        """With the batch's template, the prompt is that, filled in; rows of a batch file have their own."""
        if spec.columns.template is None or rows.is_request(self.row):
            return request
        return {**request, "prompt": spec.columns.fill(self.fields or {})}

    def _refuse(self, spec: BatchSpec, twin: int | None, model: str | None) -> None:
        if twin is not None:
            place = "in row" if spec.kind == "parquet" else "on line"
            raise BadPrompt(ErrorCode.DUPLICATE_ID, f"id '{self.id}' was used {place} {twin} already")
        if model not in (None, spec.model):
            what = f"the row asks for model '{model}', the batch for '{spec.model}'"
            remedy = f"remove the row's model or submit it in a file of its own with --model {model}"
            raise BadPrompt(ErrorCode.UNKNOWN_MODEL, f"{what}: {remedy}")


class SeenIds:
    """The ids of a file and the line of each, in a private temporary database on disk: memory stays flat."""

    def __enter__(self) -> SeenIds:
        # SQLite deletes a database without a name when it is closed, also by a crash.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute(f"PRAGMA cache_size = -{SEEN_CACHE_KB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID")
        self._database.execute("BEGIN")
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, name: str, line: int) -> int | None:
        """Remember `name`; the line that used it first, or None when it is new."""
        key = blake2b(name.encode("utf-8"), digest_size=16).digest()
        try:
            if self._database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line)).rowcount:
                return None
            found = self._database.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise OSError(f"the temporary list of ids cannot be written: {error}") from error
        return int(found[0])


def _job(
    spec: BatchSpec,
    draft: Draft,
    index: int,
    prompt: Prompt,
    params: SamplingParams,
    metadata: dict[str, Any] | None = None,
) -> PromptJob:
    return PromptJob.model_validate(
        {
            "batch": spec.batch,
            "index": index,
            "line": draft.line,
            "id": draft.id,
            _field(prompt): prompt,
            "params": params,
            "metadata": metadata or {},
            "submitted_at": time.time(),
        }
    )


def _field(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return "prompt"
    return "messages" if isinstance(prompt[0], Message) else "prompt_token_ids"


def _error(
    spec: BatchSpec,
    draft: Draft,
    index: int,
    prompt: Prompt | None,
    error: BadPrompt,
    metadata: dict[str, Any] | None = None,
) -> ErrorRow:
    place = "row" if spec.kind == "parquet" else "line"
    return ErrorRow(
        index=index,
        id=draft.id,
        line=draft.line,
        prompt=None if prompt is None else shown(prompt),
        error=ErrorDetail(code=ErrorCode(error.code), message=f"{spec.source} {place} {draft.line}: {error}"),
        metadata=metadata or {},
    )
