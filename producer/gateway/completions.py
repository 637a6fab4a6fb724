"""`POST /v1/completions`: text or token ids in, their continuation out."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field, StrictInt
from starlette.responses import Response

from producer.gateway.asking import Choices
from producer.gateway.auth import Asking
from producer.gateway.choices import STREAMED, respond
from producer.gateway.service import Here

router = APIRouter(prefix="/v1", tags=["openai"])


class CompletionBody(Choices):
    """OpenAI's body of a completion, and all sampling parameters."""

    prompt: str | list[str] | list[StrictInt] | list[list[StrictInt]] = Field(
        description="a prompt as text or token ids, or several"
    )


@router.post("/completions", responses=STREAMED, summary="Answer one prompt or several")
async def completions(request: Request, body: CompletionBody, here: Here, caller: Asking) -> Response:
    """Choices are those of the first prompt, then those of the next. With `stream`, events as for a chat."""
    return await respond(request, here, caller, body, {"prompt": body.prompt}, chat=False)
