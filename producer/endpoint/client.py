"""One call to an endpoint: sent, followed while its answer comes, and timed. A call that fails is a result as well.

Times are the client's own, from just before the request is sent. New text that arrives in one read of the network
counts as one arrival, whatever number of events it was cut into: between two arrivals lies what a reader waits for,
which for a diffusion model is a block. Tokens come from the server's `usage` and from nowhere else. Nothing of an
answer is kept but its numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

import httpx2

from producer.endpoint.events import Events
from producer.endpoint.prompts import Prompt

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions"}
TEXTS = ("content", "text", "reasoning_content", "reasoning", "refusal", "tool_calls")
"""Where an answer's text may stand, in a choice, its `delta` or its `message`."""
MOST_BYTES = 64 << 20
"""Of one answer: a server that never stops must not fill the client's memory."""
KEEP_ALIVE_S = 3.0
"""Idle connections are closed before servers close theirs (5 s is usual): a request must not meet a closing one."""
CONNECT_S = 10.0
MAX_TOKENS = 128
MESSAGE_LENGTH = 300
DONE = "[DONE]"


class Kind(StrEnum):
    """Why a call failed."""

    REFUSED = "refused"  # no connection came about
    LOST = "connection_lost"  # it broke before an answer began
    TIMEOUT = "timeout"
    UNAUTHORIZED = "unauthorized"  # 401, 403
    NOT_FOUND = "not_found"  # 404
    RATE_LIMITED = "rate_limited"  # 429
    BAD_REQUEST = "bad_request"  # any other 4xx, and redirections
    SERVER_ERROR = "server_error"  # 5xx, and errors told inside a stream
    BROKEN_STREAM = "broken_stream"  # an answer began and did not end
    BAD_ANSWER = "bad_answer"  # not what OpenAI's API answers


class CallError(Exception):
    """Why this call has no answer; never leaves this module but as `Call.failure`."""

    def __init__(self, kind: Kind, message: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(kind, message[:MESSAGE_LENGTH], status, retry_after_s)


@dataclass(frozen=True)
class Failure:
    """Why a call failed, in the server's words where it had any."""

    kind: Kind
    message: str
    status: int | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Call:
    """One call. Seconds since it was sent; tokens are None where the server did not tell them."""

    sent_at: float  # time.perf_counter()
    seconds: float
    first_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    failure: Failure | None = None

    @property
    def ended_at(self) -> float:
        return self.sent_at + self.seconds


@dataclass(frozen=True)
class Dialect:
    """Where servers differ: what the limit of new tokens is called, and whether a stream is asked for its usage."""

    limit: str = "max_tokens"
    include_usage: bool = True

    def after(self, refusal: str) -> Dialect | None:
        """What to try when a request was refused with these words; None when there is nothing left to change."""
        if "max_completion_tokens" in refusal and self.limit == "max_tokens":
            return replace(self, limit="max_completion_tokens")
        return replace(self, include_usage=False) if self.include_usage else None


@dataclass(frozen=True)
class Target:
    """Whom to ask, and for what."""

    base_url: str
    model: str
    api: Api
    stream: bool
    max_tokens: int | None
    timeout_s: float
    params: Mapping[str, Any]
    dialect: Dialect

    def limit(self, prompt: Prompt) -> int:
        """Limit of new tokens: the flag's, else the prompt's own, else `MAX_TOKENS`."""
        return self.max_tokens or prompt.max_tokens or MAX_TOKENS

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's JSON."""
        request = {"model": self.model, **prompt.params, **self.params, self.dialect.limit: self.limit(prompt)}
        if self.api == "completions":
            request["prompt"] = prompt.plain
        else:
            request["messages"] = prompt.plain if prompt.conversation else [{"role": "user", "content": prompt.plain}]
        if self.stream:
            request["stream"] = True
        if self.dialect.include_usage:
            request["stream_options"] = {"include_usage": True}
        return request


@asynccontextmanager
async def connected(key: str | None, count: int) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """So many clients, each with a connection of its own: a shared pool looks at all of them for every request.

    Uncompressed, since compression holds text back until it has enough.
    """
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    limits = httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_ALIVE_S)
    timeout, trust = httpx2.Timeout(None, connect=CONNECT_S), httpx2.create_ssl_context()
    async with AsyncExitStack() as stack:
        clients = [
            httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=trust) for _ in range(count)
        ]
        yield [await stack.enter_async_context(client) for client in clients]


async def call(http: httpx2.AsyncClient, target: Target, prompt: Prompt) -> Call:
    """Send one prompt and follow its answer to the end. Raises nothing but cancellation."""
    answer, sent_at = Answer(), time.perf_counter()
    try:
        async with asyncio.timeout(target.timeout_s):
            await _exchange(http, target, prompt, answer)
        failure = None
    except TimeoutError:
        failure = Failure(Kind.TIMEOUT, f"no whole answer within {target.timeout_s:g} s")
    except CallError as error:
        failure = error.failure
    except httpx2.HTTPError as error:
        failure = _broken(error, answer)
    return answer.timed(sent_at, time.perf_counter() - sent_at, failure)


async def _exchange(http: httpx2.AsyncClient, target: Target, prompt: Prompt, answer: Answer) -> None:
    url = f"{target.base_url}/{PATHS[target.api]}"
    async with http.stream("POST", url, json=target.body(prompt)) as response:
        if response.status_code != 200:
            raise refusal(response, await read(response))
        answer.begun = True
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            await _follow(response, answer)
        else:  # not asked to stream, or a server that does not
            answer.take(_document(await read(response)), None)
    answer.check()


async def _follow(response: httpx2.Response, answer: Answer) -> None:
    events = Events()
    async for piece in _pieces(response):
        at = time.perf_counter()
        for data in events.feed(piece):
            answer.take_event(data, at)
    for data in events.end():
        answer.take_event(data, time.perf_counter())
    if not answer.complete:
        raise CallError(Kind.BROKEN_STREAM, "the stream ended without a finish_reason and without [DONE]")


async def read(response: httpx2.Response) -> bytes:
    """The whole of a body that is not a stream."""
    return b"".join([piece async for piece in _pieces(response)])


async def _pieces(response: httpx2.Response) -> AsyncIterator[bytes]:
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MOST_BYTES:
            raise CallError(Kind.BAD_ANSWER, f"an answer of more than {MOST_BYTES >> 20} MB")
        yield piece


class Answer:
    """What has come of one answer so far."""

    def __init__(self) -> None:
        self.begun = False
        self.complete = False
        self._choices = False
        self._arrivals: list[float] = []
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None
        self._model: str | None = None

    def take_event(self, data: str, at: float) -> None:
        """The data of one event that arrived at `at`."""
        if data.strip() == DONE:
            self.complete = True
        else:
            self.take(_document(data), at)

    def take(self, document: Mapping[str, Any], at: float | None) -> None:
        """A chunk of a stream that arrived at `at`, or a whole answer (None)."""
        if document.get("error"):
            raise CallError(Kind.SERVER_ERROR, told(document))
        choices = document.get("choices")
        if not isinstance(choices, list):
            raise CallError(Kind.BAD_ANSWER, f"no 'choices' in {_excerpt(json.dumps(document))}")
        found = [choice for choice in choices if isinstance(choice, dict)]
        self._choices |= bool(found)
        for choice in found:
            self._finish_reason = _text(choice.get("finish_reason")) or self._finish_reason
        self.complete |= self._finish_reason is not None or at is None
        self._model = _text(document.get("model")) or self._model
        if isinstance(document.get("usage"), dict):  # some servers tell it with every chunk: the last one counts
            self._usage = document["usage"]
        if at is not None and any(map(_has_text, found)) and (not self._arrivals or self._arrivals[-1] != at):
            self._arrivals.append(at)

    def check(self) -> None:
        """Raises CallError when what ended is no answer."""
        if not self._choices:
            raise CallError(Kind.BAD_ANSWER, "an answer without choices")

    def timed(self, sent_at: float, seconds: float, failure: Failure | None) -> Call:
        return Call(
            sent_at=sent_at,
            seconds=seconds,
            first_s=self._arrivals[0] - sent_at if self._arrivals else None,
            gaps_s=tuple(later - earlier for earlier, later in pairwise(self._arrivals)),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            output_tokens=_count(self._usage.get("completion_tokens")),
            finish_reason=self._finish_reason,
            model=self._model,
            failure=failure,
        )


def refusal(response: httpx2.Response, body: bytes) -> CallError:
    """What a status other than 200 says, in the server's words, but without the key, which some repeat."""
    status = response.status_code
    named = {401: Kind.UNAUTHORIZED, 403: Kind.UNAUTHORIZED, 404: Kind.NOT_FOUND, 429: Kind.RATE_LIMITED}
    kind = named.get(status, Kind.SERVER_ERROR if status >= 500 else Kind.BAD_REQUEST)
    if place := response.headers.get("location"):
        message = f"redirected to {place}"
    else:
        try:
            message = told(_document(body))
        except CallError:
            message = _excerpt(body.decode("utf-8", "replace"))
    if key := response.request.headers.get("authorization", "").removeprefix("Bearer "):
        message = message.replace(key, "…")
    return CallError(kind, message, status, _retry_after(response.headers.get("retry-after")))


def told(document: Mapping[str, Any]) -> str:
    """The message in an error's JSON, in the shapes that servers give it; else the JSON itself."""
    found: Any = document.get("error") or document.get("message") or document.get("detail")
    if isinstance(found, dict):
        found = found.get("message") or found
    return found if isinstance(found, str) else _excerpt(json.dumps(found or document))


def reason(error: BaseException) -> str:
    """The innermost message of a chain of exceptions: what the system said."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner
        inner = error.__cause__ or error.__context__
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError | socket.gaierror) and error.errno:
        return os.strerror(error.errno)  # asyncio puts words of its own in its place
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _broken(error: httpx2.HTTPError, answer: Answer) -> Failure:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
        return Failure(Kind.REFUSED, reason(error))
    return Failure(Kind.BROKEN_STREAM if answer.begun else Kind.LOST, str(error) or type(error).__name__)


def _document(text: str | bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise CallError(Kind.BAD_ANSWER, f"not JSON: {_excerpt(shown)}") from None
    if not isinstance(found, dict):
        raise CallError(Kind.BAD_ANSWER, f"not a JSON object: {_excerpt(json.dumps(found))}")
    return found


def _has_text(choice: Mapping[str, Any]) -> bool:
    places = (choice, choice.get("delta"), choice.get("message"))
    return any(place.get(name) for place in places if isinstance(place, dict) for name in TEXTS)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _excerpt(text: str) -> str:
    words = " ".join(text[: 4 * MESSAGE_LENGTH].split())
    return f"'{words[:80]}{'…' if len(words) > 80 else ''}'"


def _retry_after(value: str | None) -> float | None:
    """Seconds from now, of either form of the header (RFC 9110, 10.2.3); None where it cannot be read."""
    if value is None:
        return None
    try:
        seconds = float(value) if value.strip().isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
        return max(0.0, seconds)
    except ValueError:
        return None
