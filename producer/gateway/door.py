"""Around every request, whatever comes of it: an id, a limit to its body, an entry in the audit log.

An ASGI middleware of our own: Starlette's base class would hide the client's going away from streams.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producer.gateway.errors import ApiError, too_large

GONE, BUG = 499, 500
"""Statuses in the audit log of answers that never began: the client went away, or we failed."""


@dataclass
class Entry:
    """What the audit log keeps of a request. Handlers fill in what they learn; no secrets, no text."""

    request: str
    method: str
    path: str
    client: str | None
    caller: str | None = None
    status: int = GONE
    seconds: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)

    def failed(self, error: ApiError) -> None:
        """An answer that had begun could not be ended."""
        self.told["error"] = error.code

    def document(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**{name: value for name, value in fields.items() if name != "told"}, **self.told}


class Door:
    """`record` is called once for each request, when it has ended; `most` is the largest body in bytes for a path."""

    def __init__(self, app: ASGIApp, record: Callable[[Entry], None], most: Callable[[str], int]) -> None:
        self._app = app
        self._record = record
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        entry = Entry(f"req_{secrets.token_hex(12)}", scope["method"], scope["path"], client[0] if client else None)
        scope.setdefault("state", {})["entry"] = entry
        began = time.monotonic()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = entry.request
            await send(message)

        try:
            await self._app(scope, limited(scope, receive, self._most(scope["path"])), told)
        except Exception:  # a bug: whoever is around us answers it
            entry.status = BUG if entry.status == GONE else entry.status
            raise
        finally:
            entry.seconds = round(time.monotonic() - began, 4)
            self._record(entry)


def limited(scope: Scope, receive: Receive, most: int) -> Receive:
    """`receive`, but a body of more than `most` bytes raises ApiError (413), at once where its length was announced."""
    length = Headers(scope=scope).get("content-length", "0")
    announced = int(length) if length.isdecimal() else 0
    seen = 0

    async def checked() -> Message:
        nonlocal seen
        if announced > most:
            raise _larger(most)
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise _larger(most)
        return message

    return checked


def _larger(most: int) -> Exception:
    return too_large(f"the request is larger than {most:,} bytes, the most that is taken here")
