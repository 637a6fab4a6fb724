"""`POST /v1/chat/completions`: the turns of a conversation in, the next one out."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from producer.gateway.asking import Choices
from producer.gateway.auth import Asking
from producer.gateway.choices import STREAMED, respond
from producer.gateway.service import Here

router = APIRouter(prefix="/v1", tags=["openai"])


class ChatBody(Choices):
    """OpenAI's body of a chat completion, and all sampling parameters."""

    messages: list[dict[str, Any]] = Field(
        description="turns: a role (system, developer, user or assistant) and content, text or text parts"
    )


@router.post("/chat/completions", responses=STREAMED, summary="Answer a conversation")
async def chat_completions(request: Request, body: ChatBody, here: Here, caller: Asking) -> Response:
    """With `stream`, `chat.completion.chunk` events: a block of text each."""
    return await respond(request, here, caller, body, {"messages": body.messages}, chat=True)
