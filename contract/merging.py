"""Rows of a batch's segments in index order, as the ledger marked them.

A row marked done is its first output, a row marked failed its last error. Memory is eight bytes a row, whatever the
rows' size: lines stay on the disk until they are asked for.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from contract import segments
from contract.ledger import Mark

NOWHERE = -1
OFFSET_BITS = 44
"""A location is `segment number << 44 | byte offset`: half a million segments of 16 TB each."""
OPEN_SEGMENTS = 64


class Merge:
    """Where each ended row of a batch lies among its segments. `keep` is called for every row read."""

    def __init__(
        self, folder: Path, total: int, done: bytes, failed: bytes, keep: Callable[[], None] | None = None
    ) -> None:
        self._files = segments.files(folder)
        self._done = done
        self._failed = failed
        self._streams: OrderedDict[int, BinaryIO] = OrderedDict()
        self._places = array("q", [NOWHERE]) * total
        for number, path in enumerate(self._files):
            for row in segments.rows(path):
                if keep:
                    keep()
                if row.index < total and self._wanted(row):
                    self._places[row.index] = number << OFFSET_BITS | row.offset

    def _wanted(self, row: segments.SegmentRow) -> bool:
        """The first output of a row that is done, the last error of a row that failed."""
        if row.kind is Mark.DONE:
            return is_set(self._done, row.index) and self._places[row.index] == NOWHERE
        return is_set(self._failed, row.index)

    def kind(self, index: int) -> Mark:
        return Mark.DONE if is_set(self._done, index) else Mark.FAILED

    def missing(self, mark: Mark) -> list[int]:
        """Rows with that mark which are in no segment."""
        return [index for index, place in enumerate(self._places) if place == NOWHERE and self.kind(index) is mark]

    def line(self, index: int) -> bytes | None:
        """The row's line, or None when it is in no segment."""
        place = self._places[index] if index < len(self._places) else NOWHERE
        if place == NOWHERE:
            return None
        stream = self._stream(place >> OFFSET_BITS)
        stream.seek(place & ((1 << OFFSET_BITS) - 1))
        return stream.readline()

    def _stream(self, number: int) -> BinaryIO:
        """The segment, open; the least recently read one is closed when there are too many."""
        if number not in self._streams:
            if len(self._streams) >= OPEN_SEGMENTS:
                self._streams.popitem(last=False)[1].close()
            self._streams[number] = self._files[number].open("rb")
        self._streams.move_to_end(number)
        return self._streams[number]

    def __enter__(self) -> Merge:
        return self

    def __exit__(self, *_: object) -> None:
        while self._streams:
            self._streams.popitem()[1].close()


def without_index(text: bytes) -> bytes:
    """A segment's line as it is published."""
    stripped, found = re.subn(rb'^\{"index": ?\d+, ?', b"{", text, count=1)
    if found:
        return stripped
    row = json.loads(text)
    del row["index"]
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def is_set(bits: bytes, index: int) -> bool:
    """Bit `index` of a Redis bitmap: the most significant bit of a byte comes first."""
    return index >> 3 < len(bits) and bool(bits[index >> 3] >> (7 - (index & 7)) & 1)


def set_bits(bits: bytes) -> Iterator[int]:
    for place, byte in enumerate(bits):
        if byte:
            yield from (place << 3 | bit for bit in range(8) if byte >> (7 - bit) & 1)
