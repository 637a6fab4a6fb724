"""Server-sent events, as far as OpenAI's streams use them: bytes as they come from the network to the data they carry.

Lines may be torn anywhere between two reads. Comments, which servers send to keep a connection alive, and fields other
than `data` are passed over.
"""

from __future__ import annotations


class Events:
    """The events of one stream."""

    def __init__(self) -> None:
        self._torn: list[bytes] = []
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of every event that this piece of the stream completes."""
        end, *others = piece.split(b"\n")
        self._torn.append(end)
        if not others:
            return []
        lines, self._torn = [b"".join(self._torn), *others[:-1]], [others[-1]]
        return self._lines(lines)

    def end(self) -> list[str]:
        """The data of a last event that no empty line follows."""
        lines, self._torn = [b"".join(self._torn), b""], []
        return self._lines(lines)

    def _lines(self, lines: list[bytes]) -> list[str]:
        return [data for line in lines if (data := self._line(line.removesuffix(b"\r"))) is not None]

    def _line(self, line: bytes) -> str | None:
        """The data of the event that an empty line ends."""
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
