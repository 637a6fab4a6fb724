"""A server that speaks OpenAI's API, on loopback, and misbehaves as the first word of the path says.

`http://127.0.0.1:PORT/no-usage/v1` is a server that tells no usage. Every answer is `WORDS` in `BLOCKS` blocks, and
counts one token a word; what was asked is kept in `requests`. `-at-times` behaviours show at every second request for
an answer, so that the first one, with which a measurement begins, goes well.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

WORDS = ("six", "words", "stand", "in", "this", "answer")
BLOCKS = 3
BLOCK_S = 0.005
USAGE = {"prompt_tokens": 10, "completion_tokens": len(WORDS), "total_tokens": 10 + len(WORDS)}
KEY = "sk-secret-of-the-test"
MODELS = ["tiny", "tiny-base"]
PRELUDE = b": the server thinks\r\n\r\n"


class FakeEndpoint:
    """The address of a running fake, and what it was asked."""

    def __init__(self) -> None:
        self.root = ""
        self.forget()

    def forget(self) -> None:
        """As if nothing had been asked yet."""
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.times: Counter[str] = Counter()

    def url(self, behaviour: str) -> str:
        return f"{self.root}/{behaviour}/v1"

    def bodies(self, behaviour: str) -> list[dict[str, Any]]:
        """Bodies of the requests for answers, in order."""
        return [one["body"] for one in self.requests if one["behaviour"] == behaviour]

    async def models(self, request: Request) -> Response:
        behaviour = request.path_params["behaviour"]
        if behaviour == "unauthorized" and request.headers.get("authorization") != f"Bearer {KEY}":
            given = request.headers.get("authorization", "none")
            return _error(401, f"Incorrect API key provided: {given}")
        if behaviour in ("no-list", "nothing"):
            return _error(404, "Not Found")
        if behaviour == "web-page":
            return HTMLResponse("<html>Welcome</html>")
        listed = MODELS[:1] if behaviour == "one-model" else MODELS
        return JSONResponse({"object": "list", "data": [{"id": one, "object": "model"} for one in listed]})

    async def answer(self, request: Request) -> Response:
        behaviour, body = request.path_params["behaviour"], await request.json()
        chat = request.url.path.endswith("/chat/completions")
        self.requests.append({"behaviour": behaviour, "body": body, "headers": dict(request.headers)})
        self.times[behaviour] += 1
        if behaviour.endswith("-at-times"):
            behaviour = behaviour.removesuffix("-at-times") if self.times[behaviour] % 2 == 0 else "good"
        if behaviour == "dies":
            behaviour = "good" if self.times[behaviour] <= 4 else "out-of-memory"
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            refused = self._refusal(behaviour, body)
            if refused is not None:
                return refused
            if behaviour == "garbage":
                return Response("{'choices': [", media_type="application/json")
            while behaviour == "hangs" and not await request.is_disconnected():
                await asyncio.sleep(BLOCK_S)
            await asyncio.sleep(BLOCK_S)
            if not body.get("stream") or behaviour == "no-stream":
                return JSONResponse(_whole(behaviour, body, chat))
        finally:
            self.running -= 1
        return StreamingResponse(self._stream(behaviour, body, chat), media_type="text/event-stream")

    def _refusal(self, behaviour: str, body: dict[str, Any]) -> Response | None:
        if behaviour == "nothing":
            return _error(404, "Not Found")
        if body["model"] not in MODELS and behaviour != "any-model":
            return _error(404, f"The model `{body['model']}` does not exist.")
        if behaviour == "no-stream-options" and "stream_options" in body:
            return JSONResponse({"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"]}]}, 422)
        if behaviour == "new-limit" and "max_tokens" in body:
            return _error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        if behaviour == "out-of-memory":
            return _error(500, "CUDA out of memory")
        if behaviour == "busy":
            return _error(429, "slow down", {"Retry-After": "0"})
        return None

    async def _stream(self, behaviour: str, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        yield PRELUDE
        if chat:
            yield _event(_chunk(body, {"delta": {"role": "assistant", "content": ""}}))
        for number in range(BLOCKS):
            await asyncio.sleep(0.3 if behaviour == "slow" else BLOCK_S)
            if behaviour == "error-inside" and number:
                yield _event({"error": {"message": "the worker is gone"}})
                return
            if behaviour == "breaks" and number:
                raise ConnectionResetError("on purpose")
            if behaviour == "ends-early" and number:
                return
            # One block in one write, but a word an event.
            yield b"".join(_event(_chunk(body, _words(word, chat))) for word in WORDS[2 * number : 2 * number + 2])
        yield _event(
            _chunk(body, {"delta": {}, "finish_reason": "stop"} if chat else {"text": "", "finish_reason": "stop"})
        )
        if behaviour not in ("no-usage", "no-stream-options") and body.get("stream_options", {}).get("include_usage"):
            yield _event({"model": body["model"], "choices": [], "usage": USAGE})
        yield b"data: [DONE]\n\n"


def _words(word: str, chat: bool) -> dict[str, Any]:
    return {"delta": {"content": f"{word} "}} if chat else {"text": f"{word} "}


def _whole(behaviour: str, body: dict[str, Any], chat: bool) -> dict[str, Any]:
    text = " ".join(WORDS)
    choice = {"index": 0, "finish_reason": "stop", **({"message": {"content": text}} if chat else {"text": text})}
    usage = {} if behaviour == "no-usage" else {"usage": USAGE}
    return {"model": body["model"], "choices": [choice], **usage}


def _chunk(body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {"model": body["model"], "choices": [{"index": 0, "finish_reason": None, **choice}], "usage": None}


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(document)}\n\n".encode()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "error"}}, status, headers)


@contextmanager
def running() -> Iterator[FakeEndpoint]:
    """The fake on a free port of loopback, in a thread, until the block ends."""
    fake = FakeEndpoint()
    routes = [
        Route("/{behaviour}/v1/models", fake.models),
        Route("/{behaviour}/v1/chat/completions", fake.answer, methods=["POST"]),
        Route("/{behaviour}/v1/completions", fake.answer, methods=["POST"]),
        Route("/{rest:path}", lambda _: PlainTextResponse("nothing here", 404)),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", headers=[("server", "fake/1.0")])
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the fake did not start"
        threading.Event().wait(0.005)
    fake.root = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join()
