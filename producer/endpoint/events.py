"""Server-sent events, as far as OpenAI's streams use them: bytes as they come from the network to the data they carry.

Lines may be torn anywhere between two reads. Comments, which servers send to keep a connection alive, and fields other
than `data` are passed over.
"""

from __future__ import annotations


class Events:
    """The events of one stream."""

    def __init__(self) -> None:
        self._torn = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that this piece of the stream completes."""
        *lines, self._torn = (self._torn + piece).replace(b"\r\n", b"\n").split(b"\n")
        return [data for line in lines if (data := self._line(line)) is not None]

    def end(self) -> list[str]:
        """The data of a last event that no empty line follows."""
        last = [self._line(self._torn), self._line(b"")]
        self._torn = b""
        return [data for data in last if data is not None]

    def _line(self, line: bytes) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
