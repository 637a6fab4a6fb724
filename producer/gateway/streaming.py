"""An answer as server-sent events: each block of text as it is finished, or word by word at a steady rate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from contract.jobs import Completion
from producer.gateway.answers import Answer
from producer.gateway.dispatch import Part
from producer.gateway.errors import ApiError
from producer.gateway.running import Running

WORD = re.compile(r"\s*\S+|\s+$")
SENDING_S = 5.0
"""After its deadline a stream that is still not sent, because nobody reads it, is given up."""
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Lets go of the request whatever becomes of the response, also where nobody reads it."""

    def __init__(self, events: AsyncIterator[bytes], running: Running) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._running.asked.deadline + SENDING_S):
                    await super().__call__(scope, receive, send)
        finally:
            self._running.close()


async def events(
    parts: AsyncIterator[Part],
    answer: Answer,
    include_usage: bool,
    ended: Callable[[Sequence[Completion], dict[str, int]], None],
    failed: Callable[[ApiError], None],
) -> AsyncIterator[bytes]:
    """What is sent. An error after the stream began is its last event, as OpenAI's clients expect it."""
    begun: set[int] = set()
    ends: list[Completion] = []
    try:
        async for part in parts:
            if part.choice not in begun:
                begun.add(part.choice)
                if opening := answer.opening(part.choice):
                    yield event(opening)
            if part.text:
                yield event(answer.more(part.choice, part.text))
            if part.end:
                ends.append(part.end)
                yield event(answer.last(part))
    except ApiError as error:
        failed(error)
        yield event(error.body)
        return
    told = answer.usage(ends)
    ended(ends, told["usage"])
    if include_usage:
        yield event(told)
    yield DONE


async def after(first: Part, rest: AsyncIterator[Part]) -> AsyncIterator[Part]:
    yield first
    async for part in rest:
        yield part


async def steady(parts: AsyncIterator[Part], rate: float) -> AsyncIterator[Part]:
    """`parts` word by word, `rate` tokens a second of all choices together, never before they are there."""
    loop = asyncio.get_running_loop()
    due, told = loop.time(), dict[int, int]()
    async for part in parts:
        words = WORD.findall(part.text)
        seconds = (part.tokens - told.get(part.choice, 0)) / rate
        told[part.choice] = max(part.tokens, told.get(part.choice, 0))
        for word in words:
            await asyncio.sleep(max(0.0, due - loop.time()))
            due = max(due, loop.time()) + seconds * len(word) / len(part.text)
            yield replace(part, text=word, end=None)
        if part.end or not words:
            yield replace(part, text="")


def event(document: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
