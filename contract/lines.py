"""A source file as lines: bounded, counted, each with its place in the file; the contents of a `.gz` like any other."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from contract.errors import BadPrompt
from contract.jobs import ErrorCode
from contract.ledger import Cursor

BOM = b"\xef\xbb\xbf"
SKIP_BYTES = 1 << 20
TORN_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
Tick = Callable[[], None]


@dataclass(frozen=True)
class Line:
    """A line without its end and without a byte order mark.

    `offset` is that of its first byte, `end` the next line's; `error` says why a line has no content.
    """

    number: int
    offset: int
    end: int
    content: bytes
    error: BadPrompt | None = None

    @property
    def raw(self) -> bytes:
        """The content. Raises BadPrompt where there is none."""
        if self.error is not None:
            raise self.error
        return self.content


def unpacked(stream: BinaryIO) -> BinaryIO:
    """What a `.gz` holds. Its offsets are those of the contents; to seek back is to read from the start."""
    return cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=stream, mode="rb"), SKIP_BYTES))


def lines(stream: BinaryIO, start: Cursor, limit: int, tick: Tick) -> Iterator[Line]:
    """Lines from `start` on, split on `\\n` only; of a line beyond `limit` bytes only the end is sought.

    Where a `.gz` is damaged, one line without content is the last. `tick` is called at least once a line.
    """
    number, offset = start.line, start.offset
    try:
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
            yield Line(number, first, end, content) if fits else Line(number, first, end, b"", too_long(limit))
            number, offset = number + 1, end
    except TORN_GZIP as error:
        yield Line(number, offset, offset, b"", torn(error))


def too_long(limit: int) -> BadPrompt:
    return BadPrompt(ErrorCode.BAD_ROW, f"longer than {limit:,} bytes: split it, or raise max_line_mb")


def torn(error: Exception) -> BadPrompt:
    return BadPrompt(ErrorCode.BAD_FILE, f"from here on the .gz is damaged ({error}): nothing more of it was read")
