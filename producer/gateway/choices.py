"""What OpenAI's two addresses for text do alike: run a request, and answer it whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from contract.jobs import Completion
from producer.gateway.answers import Answer
from producer.gateway.asking import Choices, prompts_of
from producer.gateway.limits import Caller
from producer.gateway.running import Running, Wanted, begin, note_end, unless_gone
from producer.gateway.service import Service
from producer.gateway.streaming import EventStream, after, events, steady

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI page."""


async def respond(
    request: Request, here: Service, caller: Caller, body: Choices, asked: dict[str, Any], chat: bool
) -> Response:
    """`asked` is what the body asks, as a row of a batch would.

    Raises ApiError for whatever goes wrong before the first word.
    """
    wanted = Wanted(
        model=here.model(body.model),
        prompts=prompts_of(asked),
        params=body.sampling(here.settings.params),
        n=body.n or 1,
        stream=bool(body.stream),
    )
    running = await begin(request, here, caller, wanted)
    answer = Answer(running.asked.request, wanted.model, chat, wanted.n)
    if wanted.stream:
        return await _stream(request, here, running, answer, body)
    try:
        ends = await unless_gone(request, running.ends())
    finally:
        running.close()
    told = answer.whole(ends)
    note_end(request, here, [part.end for part in ends if part.end], told["usage"])
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

    def ended(ends: Sequence[Completion], counted: dict[str, int]) -> None:
        note_end(request, here, ends, counted)

    sent = events(steady(parts, rate) if rate else parts, answer, include_usage, ended, request.state.entry.failed)
    return EventStream(sent, running)
