"""`/v1/files`: bring what is to be answered, fetch what came of it, take it away. A key sees its own files only."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response, StreamingResponse

from producer.gateway import outcomes
from producer.gateway.auth import Asking
from producer.gateway.errors import ApiError, not_found
from producer.gateway.filestore import Stored
from producer.gateway.pages import After, page
from producer.gateway.service import Here, Service
from producer.gateway.uploads import PURPOSES, receive

router = APIRouter(prefix="/v1/files", tags=["openai"])
FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                },
            }
        }
    },
}


@router.post("", summary="Upload a file of requests", openapi_extra={"requestBody": FORM})
async def upload(request: Request, here: Here, caller: Asking) -> dict[str, Any]:
    """A line each, as OpenAI's batch files have them."""
    here.limits.count(caller)
    stored = await receive(request, here.files, caller.name)
    request.state.entry.told |= {"file": stored.id, "bytes": stored.bytes}
    return document(stored)


@router.get("", summary="List files, the newest first")
async def list_files(
    here: Here,
    caller: Asking,
    purpose: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: After = None,
) -> dict[str, Any]:
    """Uploaded ones, and those that came of batches."""

    def read() -> dict[str, Any]:
        found = (one for one in _all(here, caller.name) if purpose in (None, one.purpose))
        documents = (document(one) for one in (found if order == "desc" else reversed(list(found))))
        return page(documents, limit, after)

    return await here.in_thread(read)


@router.get("/{file_id}", summary="What is known of a file")
async def retrieve(file_id: str, here: Here, caller: Asking) -> dict[str, Any]:
    return document(await here.in_thread(_find, here, file_id, caller.name))


@router.get(
    "/{file_id}/content",
    summary="The file itself",
    response_class=FileResponse,
    responses={200: {"content": {"application/jsonl": {}}}},
)
async def content(file_id: str, here: Here, caller: Asking) -> Response:
    stored = await here.in_thread(_find, here, file_id, caller.name)
    if stored.purpose != outcomes.PURPOSE:
        return FileResponse(stored.place, media_type="application/jsonl", filename=stored.filename)
    try:
        pieces = await here.in_thread(outcomes.read, stored, here.settings.folders)
    except FileNotFoundError:
        raise missing(file_id) from None
    headers = {"Content-Length": str(stored.bytes)}
    return StreamingResponse(pieces, media_type="application/jsonl", headers=headers)


@router.delete("/{file_id}", summary="Take a file away")
async def delete(file_id: str, here: Here, caller: Asking) -> dict[str, Any]:
    """A batch that was made of it goes on: it has its own copy. What came of a batch stays in the other forms."""

    def remove() -> None:
        stored = _find(here, file_id, caller.name)
        if stored.purpose == outcomes.PURPOSE:
            outcomes.remove(stored, here.settings.folders)
        else:
            here.files.delete(stored)

    await here.in_thread(remove)
    return {"id": file_id, "object": "file", "deleted": True}


def document(stored: Stored) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.bytes,
        "created_at": int(stored.created_at),
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "expires_at": None,
    }


def _find(here: Service, file_id: str, owner: str) -> Stored:
    stored = here.files.get(file_id, owner) or outcomes.file(file_id, owner, here.ledger, here.settings.folders)
    if stored is None:
        raise missing(file_id)
    return stored


def missing(file_id: str, param: str = "file_id") -> ApiError:
    return not_found(f"there is no file '{file_id[:100]}'", param, "file_not_found")


def _all(here: Service, owner: str) -> Iterator[Stored]:
    uploaded = here.files.newest_first(owner)
    came = outcomes.newest_first(owner, here.ledger, here.settings.folders)
    return heapq.merge(uploaded, came, key=lambda stored: stored.created_at, reverse=True)
