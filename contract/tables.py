"""`.jsonl`, `.csv` and `.parquet` as rows of keys and values, one in memory at a time (of parquet: a small batch).

Knows nothing of prompts: `contract.parser` does. A row that cannot be read is a row with an error; where the whole file
cannot (a column that is needed is missing, say), one such row is the first and the last.
"""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from contract import rows
from contract.columns import PROMPTS, Columns
from contract.errors import BadPrompt, nearest
from contract.jobs import ErrorCode
from contract.ledger import BatchSpec, Cursor
from contract.lines import Line, Tick, lines, too_long

PARQUET_ROWS = 256
PARQUET_BUFFER = 1 << 20
NO_PYARROW = "reading .parquet needs pyarrow: pip install 'dllm-batch[parquet]'"
SHOWN_COLUMNS = 12


@dataclass(frozen=True)
class Record:
    """A row and its place: `line` is where it begins (in parquet its number), `end` and `next_line` where the next."""

    line: int
    end: int
    next_line: int
    fields: dict[str, Any] = field(default_factory=dict)
    error: BadPrompt | None = None


def records(stream: BinaryIO, spec: BatchSpec, limit: int, tick: Tick) -> Iterator[Record]:
    """The rows of a table from its start."""
    if spec.kind == "parquet":
        return _parquet(stream, spec.columns, limit, tick)
    found = lines(stream, Cursor(), limit, tick)
    return _csv(found, spec.columns, limit) if spec.kind == "csv" else _jsonl(found)


def _jsonl(found: Iterable[Line]) -> Iterator[Record]:
    for line in found:
        if line.error is None and not line.content.strip():
            continue
        try:
            fields, error = rows.decode(line.raw, line.offset), None
        except BadPrompt as refused:
            fields, error = {}, refused
        yield Record(line.number, line.end, line.number + 1, fields, error)


# CSV


class _Feed:
    """Lines as the csv module takes them: a record takes one, and more where a quoted value has line feeds.

    What cannot be read of a line is noted and replaced: raising would tear the record apart.
    """

    def __init__(self, found: Iterator[Line], limit: int) -> None:
        self._lines = found
        self._limit = limit
        self._size = 0
        self.first: int | None = None
        self.last = 0
        self.end = 0
        self.error: BadPrompt | None = None

    def begin(self) -> None:
        """The next line begins a record."""
        self._size, self.first, self.error = 0, None, None

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.first = self.first or line.number
        self.last, self.end = line.number, line.end
        self._size += len(line.content)
        if self._size > self._limit:
            raise too_long(self._limit)
        try:
            return f"{rows.text(line.raw, line.offset)}\n"
        except BadPrompt as error:
            self.error = self.error or error
            return f"{line.content.decode('utf-8', 'replace')}\n"


def _csv(found: Iterator[Line], columns: Columns, limit: int) -> Iterator[Record]:
    if csv.field_size_limit() <= limit:
        csv.field_size_limit(limit + 1)  # its own limit is lower and would be told in other words
    feed = _Feed(found, limit)
    reader = csv.reader(feed, delimiter=columns.delimiter, strict=True)
    header: list[str] | None = None
    while (read := _next(reader, feed)) is not None:
        cells, error = read
        if not cells and error is None:
            continue  # a blank line
        place = feed.first or feed.last, feed.end, feed.last + 1
        if error is not None:
            yield Record(*place, error=_of_file(error) if header is None else error)
        elif header is None:
            header = [cell.strip() or f"column_{number}" for number, cell in enumerate(cells, start=1)]
            error = objection(header, columns)
            if error is not None:
                yield Record(*place, error=error)
        elif len(cells) != len(header):
            what = f"it has {len(cells)} values, the first line names {len(header)} columns"
            remedy = f"put values that hold '{columns.delimiter}', line feeds or quotes into double quotes"
            yield Record(*place, error=BadPrompt(ErrorCode.BAD_ROW, f"{what}: {remedy}"))
        else:
            yield Record(*place, fields=dict(zip(header, cells, strict=True)))
        if header is None or (error is not None and error.code == ErrorCode.BAD_FILE):
            return


def _next(reader: Iterator[list[str]], feed: _Feed) -> tuple[list[str], BadPrompt | None] | None:
    """The next record's values, or why it has none; None at the end. The reader begins anew after an error."""
    feed.begin()
    try:
        cells = next(reader)
        return cells, feed.error
    except StopIteration:
        return None
    except BadPrompt as error:
        return [], error
    except csv.Error as error:
        why = "a quote that opens here is never closed" if "end of data" in str(error) else str(error)
        return [], feed.error or BadPrompt(ErrorCode.BAD_ROW, f"not CSV: {why}")


def _of_file(error: BadPrompt) -> BadPrompt:
    """Without its first line nothing of a CSV can be understood."""
    return BadPrompt(ErrorCode.BAD_FILE, f"the line that names the columns cannot be read: {error}")


# Parquet


def _parquet(stream: BinaryIO, columns: Columns, limit: int, tick: Tick) -> Iterator[Record]:
    """Pages of a row group are read as they are needed. An offset is the size of the rows so far, in memory."""
    number, offset = 1, 0
    try:
        file = _pyarrow().ParquetFile(stream, buffer_size=PARQUET_BUFFER, pre_buffer=False)
        error = objection(file.schema_arrow.names, columns)
        if error is not None:
            yield Record(number, offset, number + 1, error=error)
            return
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            tick()
            size = batch.nbytes // batch.num_rows + 1 if batch.num_rows else 0
            for values in batch.to_pylist():
                offset += size
                yield _parquet_record(values, number, offset, limit)
                number += 1
    except (ValueError, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or str(error) == NO_PYARROW):
            raise  # the disk's fault, or ours, not the file's
        what = f"from here on the file cannot be read as parquet: {' '.join(str(error).split())[:200]}"
        yield Record(number, offset, number + 1, error=BadPrompt(ErrorCode.BAD_FILE, what))


def _parquet_record(values: Mapping[str, Any], number: int, end: int, limit: int) -> Record:
    fields = {name: _plain(value) for name, value in values.items()}
    fits = sum(len(value.encode("utf-8", "replace")) for value in fields.values() if isinstance(value, str)) <= limit
    return Record(number, end, number + 1, fields) if fits else Record(number, end, number + 1, error=too_long(limit))


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise OSError(NO_PYARROW) from None
    return pyarrow.parquet


def can_read_parquet() -> bool:
    """Is pyarrow installed?"""
    try:
        _pyarrow()
    except OSError:
        return False
    return True


def _plain(value: Any) -> Any:
    """`value` as JSON has it: dates and decimals as text, bytes as base64, not-a-number as nothing."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


# Both


def objection(names: Sequence[str], columns: Columns) -> BadPrompt | None:
    """Why a table with these columns gives no prompts; None when it may."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return BadPrompt(ErrorCode.BAD_FILE, f"two columns are called '{twice}': rename one")
    for name in columns.needed:
        if name not in names:
            what = f"there is no column '{name}'{nearest(name, names)}; there are {_listed(names)}"
            return BadPrompt(ErrorCode.BAD_FILE, what)
    if not columns.names_the_prompt and not any(name in PROMPTS for name in names):
        what = f"no column is called {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}; there are {_listed(names)}"
        return BadPrompt(ErrorCode.BAD_FILE, f"{what}: name one with --prompt-column or --messages-column")
    for name in names:
        if name not in columns.needed and (meant := rows.mistyped(name)):
            return BadPrompt(ErrorCode.BAD_FILE, f"column '{name}': did you mean '{meant}'? Rename it either way")
    return None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:40] for name in names[:SHOWN_COLUMNS])
    return f"{shown}, …" if len(names) > SHOWN_COLUMNS else shown
