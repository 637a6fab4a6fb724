"""A source file as a stream of prompt jobs and error rows, each with the cursor behind it.

Second stage of a prompt's life: the file is claimed, the producer submits what comes out here, and `contract.auditing`
reads it once more for rows that were lost. Holds one line at a time, whatever the file's size, and can go on from any
cursor with exactly the same rows. Must not know Redis: what a bad line costs is one error row, never the batch.
"""

from __future__ import annotations

import io
import sqlite3
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO

from contract import rows
from contract.errors import BadPrompt
from contract.jobs import ErrorCode, ErrorDetail, ErrorRow, Message, Prompt, PromptJob, shown
from contract.ledger import BatchSpec, Cursor
from contract.sampling import SamplingParams, parse_params

BOM = b"\xef\xbb\xbf"
SKIP_BYTES = 1 << 20
SEEN_CACHE_KB = 32 * 1024


@dataclass(frozen=True)
class Parsed:
    """One row of the source and where reading goes on after it."""

    row: PromptJob | ErrorRow
    cursor: Cursor


@dataclass(frozen=True)
class Line:
    """A line without its end and without a byte order mark.

    `offset` is that of its first byte, `end` the next line's; `raw` is None when it was too long to be read.
    """

    number: int
    offset: int
    end: int
    raw: bytes | None


def parse(
    stream: BinaryIO,
    spec: BatchSpec,
    cursor: Cursor,
    max_line_bytes: int,
    tick: Callable[[], None] = lambda: None,
) -> Generator[Parsed, None, None]:
    """The rows of `stream` (seekable) from `cursor` on, in order.

    `tick` is called at least once a line, also while earlier lines are read again: it may raise to end the reading.
    """
    if spec.kind == "jsonl":
        return _parse_jsonl(stream, spec, cursor, max_line_bytes, tick)
    if spec.txt_mode == "file":
        return _parse_file(stream, spec, cursor, max_line_bytes)
    return _parse_txt(stream, spec, cursor, max_line_bytes, tick)


def _parse_txt(
    stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int, tick: Callable[[], None]
) -> Generator[Parsed, None, None]:
    index = cursor.index
    for line in _lines(stream, cursor, limit, tick):
        row = _txt_row(line, index, spec, limit)
        if row is not None:
            index += 1
            yield Parsed(row, Cursor(offset=line.end, line=line.number + 1, index=index))


def _txt_row(line: Line, index: int, spec: BatchSpec, limit: int) -> PromptJob | ErrorRow | None:
    """The row of a line, or of a whole file; None when it is nothing but white space."""
    try:
        prompt = rows.text(_whole(line, limit), line.offset).replace("\r\n", "\n").rstrip("\n")
    except BadPrompt as error:
        return _error(spec, index, str(index), line.number, None, error)
    return _job(spec, index, str(index), line.number, prompt, spec.params) if prompt.strip() else None


def _parse_file(stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int) -> Generator[Parsed, None, None]:
    """The whole file as one prompt."""
    if cursor.index:
        return
    stream.seek(0)
    raw = stream.read(limit + len(BOM) + 1)
    content = raw.removeprefix(BOM)
    offset = len(raw) - len(content)
    line = Line(1, offset, stream.seek(0, io.SEEK_END), content if len(content) <= limit else None)
    row = _txt_row(line, 0, spec, limit)
    if row is not None:
        yield Parsed(row, Cursor(offset=line.end, line=2, index=1))


def _parse_jsonl(
    stream: BinaryIO, spec: BatchSpec, cursor: Cursor, limit: int, tick: Callable[[], None]
) -> Generator[Parsed, None, None]:
    """Always reads from the start: ids before the cursor must be known to tell a duplicate after it."""
    index = 0
    with SeenIds() as seen:
        for line in _lines(stream, Cursor(), limit, tick):
            if line.raw is not None and not line.raw.strip():
                continue
            draft = Draft.read(line, index, limit)
            twin = seen.add(draft.id, line.number)
            index += 1
            if line.offset >= cursor.offset:
                row = draft.row(spec, index - 1, twin)
                yield Parsed(row, Cursor(offset=line.end, line=line.number + 1, index=index))


@dataclass(frozen=True)
class Draft:
    """A `.jsonl` line of which the id is known; `error` says why nothing more can be."""

    line: int
    id: str
    fields: rows.Row
    error: BadPrompt | None = None

    @staticmethod
    def read(line: Line, index: int, limit: int) -> Draft:
        """Enough of the line to name it: the user's id, else the index."""
        try:
            fields = rows.decode(_whole(line, limit), line.offset)
            return Draft(line.number, rows.row_id(fields) or str(index), fields)
        except BadPrompt as error:
            return Draft(line.number, str(index), {}, error)

    def row(self, spec: BatchSpec, index: int, twin: int | None) -> PromptJob | ErrorRow:
        """The finished row; `twin` is the line that used the same id before."""
        prompt: Prompt | None = None
        try:
            if self.error is not None:
                raise self.error
            request = rows.body(self.fields)
            prompt = rows.prompt(request)
            self._refuse(spec, twin, rows.model(request))
            asked = rows.parameters(request)
            params = parse_params(asked, spec.params) if asked else spec.params
            return _job(spec, index, self.id, self.line, prompt, params)
        except BadPrompt as error:
            return _error(spec, index, self.id, self.line, prompt, error)

    def _refuse(self, spec: BatchSpec, twin: int | None, model: str | None) -> None:
        if twin is not None:
            raise BadPrompt(ErrorCode.DUPLICATE_ID, f"id '{self.id}' was used on line {twin} already")
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


def _lines(stream: BinaryIO, start: Cursor, limit: int, tick: Callable[[], None]) -> Iterator[Line]:
    """Lines from `start` on, split on `\\n` only; of a line beyond `limit` bytes only the end is sought."""
    number, offset = start.line, start.offset
    stream.seek(offset)
    while raw := stream.readline(limit + len(BOM) + 2):
        tick()
        end = offset + len(raw)
        whole = raw.endswith(b"\n")
        while not whole and (more := stream.readline(SKIP_BYTES)):
            tick()
            end += len(more)
            whole = more.endswith(b"\n")
        content = raw.removeprefix(BOM) if offset == 0 else raw
        first = offset + len(raw) - len(content)
        content = content.removesuffix(b"\n").removesuffix(b"\r")
        fits = end == offset + len(raw) and len(content) <= limit
        yield Line(number, first, end, content if fits else None)
        number, offset = number + 1, end


def _whole(line: Line, limit: int) -> bytes:
    if line.raw is None:
        raise BadPrompt(ErrorCode.BAD_ROW, f"longer than {limit:,} bytes: split it, or raise max_line_mb")
    return line.raw


def _job(spec: BatchSpec, index: int, name: str, line: int, prompt: Prompt, params: SamplingParams) -> PromptJob:
    return PromptJob.model_validate(
        {
            "batch": spec.batch,
            "index": index,
            "line": line,
            "id": name,
            _field(prompt): prompt,
            "params": params,
            "submitted_at": time.time(),
        }
    )


def _field(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return "prompt"
    return "messages" if isinstance(prompt[0], Message) else "prompt_token_ids"


def _error(spec: BatchSpec, index: int, name: str, line: int, prompt: Prompt | None, error: BadPrompt) -> ErrorRow:
    return ErrorRow(
        index=index,
        id=name,
        line=line,
        prompt=None if prompt is None else shown(prompt),
        error=ErrorDetail(code=ErrorCode(error.code), message=f"{spec.source} line {line}: {error}"),
    )
