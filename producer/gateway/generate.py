"""`POST /generate`: a prompt in, its output and the seconds it took out, in few words."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from producer.gateway.answers import denoise, finish_reason, usage
from producer.gateway.asking import Body, prompts_of
from producer.gateway.auth import Asking
from producer.gateway.errors import bad_request
from producer.gateway.running import Wanted, begin, note_end, unless_gone
from producer.gateway.service import Here

router = APIRouter(tags=["generate"])


class GenerateBody(Body):
    """A prompt in one of three forms, and all sampling parameters."""

    prompt: str | None = Field(None, description="text")
    messages: list[dict[str, Any]] | None = Field(None, description="or the turns of a conversation")
    prompt_token_ids: list[int] | None = Field(None, description="or token ids")


class Generated(BaseModel):
    """The answer."""

    id: str
    model: str
    output: str
    finish_reason: str
    elapsed_seconds: float
    usage: dict[str, int]
    denoise: dict[str, int | float]
    params: dict[str, Any] = Field(description="the sampling parameters as they were applied, seed included")


@router.post("/generate", summary="Answer one prompt")
async def generate(request: Request, body: GenerateBody, here: Here, caller: Asking) -> Generated:
    """Waits until the answer is there."""
    began = time.monotonic()
    given = body.model_dump(include={"prompt", "messages", "prompt_token_ids"}, exclude_none=True)
    prompts = prompts_of(given)
    wanted = Wanted(here.model(body.model), prompts, body.sampling(here.settings.params))
    running = await begin(request, here, caller, wanted)
    try:
        (part,) = await unless_gone(request, running.ends())
    finally:
        running.close()
    assert part.end is not None
    if part.refused:
        raise bad_request("the output is withheld: the service's filters refuse it", code="content_filter")
    note_end(request, here, [part.end], usage([part.end]))
    return Generated(
        id=running.asked.request,
        model=part.end.model,
        output=part.end.output,
        finish_reason=finish_reason(part),
        elapsed_seconds=round(time.monotonic() - began, 4),
        usage=usage([part.end]),
        denoise=denoise([part.end]),
        params=part.end.params,
    )
