"""What OpenAI's two addresses for text do alike: run a request, and answer it whole or as a stream."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from producer.gateway.answers import Answer
from producer.gateway.asking import Choices
from producer.gateway.limits import Caller
from producer.gateway.running import Running, Wanted, begin, unless_gone
from producer.gateway.service import Service
from producer.gateway.streaming import EventStream, after, events, steady

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI page."""


async def respond(
    request: Request, here: Service, caller: Caller, wanted: Wanted, body: Choices, chat: bool
) -> Response:
    """Raises ApiError for whatever goes wrong before the first word."""
    running = await begin(request, here, caller, wanted)
    answer = Answer(running.asked.request, wanted.model, chat, wanted.n)
    if wanted.stream:
        return await _stream(request, here, running, answer, body)
    try:
        ends = await unless_gone(request, running.ends())
    finally:
        running.close()
    told = answer.whole(ends)
    request.state.entry.told["usage"] = told["usage"]
    return JSONResponse(told)


async def _stream(request: Request, here: Service, running: Running, answer: Answer, body: Choices) -> Response:
    """The response begins when a worker has the request, so that what fails before has its status."""
    rate = here.settings.serve_stream_rate if body.stream_rate is None else body.stream_rate
    parts = running.parts()
    try:
        first = await unless_gone(request, anext(parts))
    except BaseException:
        running.close()
        raise
    parts = after(first, parts)
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    sent = events(steady(parts, rate) if rate else parts, answer, request.state.entry, include_usage)
    return EventStream(sent, running)
