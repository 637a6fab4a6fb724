"""Rows of a batch's segments in index order, as the ledger marked them.

A row marked done is its first output, a row marked failed or cancelled its last error of that kind. Memory is eight
bytes a row, whatever the rows' size: lines stay on the disk until they are asked for.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from contract import segments
from contract.ledger import Mark

NOWHERE = -1
OFFSET_BITS = 44
"""A location is `segment number << 44 | byte offset`: half a million segments of 16 TB each."""
OPEN_SEGMENTS = 64


class Merge:
    """Where each ended row of a batch lies among its segments, `files`, the oldest first.

    `keep` is called for every row read.
    """

    def __init__(
        self, files: Sequence[Path], total: int, bitmaps: Mapping[Mark, bytes], keep: Callable[[], None] | None = None
    ) -> None:
        self._files = files
        self._bitmaps = bitmaps
        self._streams: OrderedDict[int, BinaryIO] = OrderedDict()
        self._places = array("q", [NOWHERE]) * total
        for number, path in enumerate(self._files):
            for row in segments.rows(path):
                if keep:
                    keep()
                if row.index < total and self._wanted(row):
                    self._places[row.index] = number << OFFSET_BITS | row.offset

    def _wanted(self, row: segments.SegmentRow) -> bool:
        """The first output of a row that is done, the last error of a row that failed or was cancelled."""
        if not is_set(self._bitmaps.get(row.kind, b""), row.index):
            return False
        return row.kind is not Mark.DONE or self._places[row.index] == NOWHERE

    def kind(self, index: int) -> Mark:
        return next((mark for mark, bits in self._bitmaps.items() if is_set(bits, index)), Mark.FAILED)

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


def clear_bits(bits: bytes, count: int) -> Iterator[int]:
    """The indices below `count` that are not set."""
    for place in range((count + 7) >> 3):
        byte = bits[place] if place < len(bits) else 0
        if byte != 0xFF:
            yield from (i for bit in range(8) if not byte >> (7 - bit) & 1 and (i := place << 3 | bit) < count)


def union(bitmaps: Iterable[bytes]) -> bytes:
    """What is set in any of `bitmaps`."""
    found = list(bitmaps)
    size = max(map(len, found), default=0)
    joined = 0
    for bits in found:
        joined |= int.from_bytes(bits.ljust(size, b"\0"), "big")
    return joined.to_bytes(size, "big")
