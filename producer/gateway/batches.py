"""`/v1/batches`: a file of requests becomes a batch like any other, and is told of in OpenAI's words.

The ledger has all of it; this service submits batches as `producer watch` does (`producer.gateway.submitting`), and
another process, or this one after a restart, goes on with them. A key sees its own batches only.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from contract import cancelling, rows
from contract.errors import BadPrompt
from contract.ledger import Batch, Served
from producer.claims import Claims
from producer.gateway import outcomes
from producer.gateway.auth import Asking
from producer.gateway.errors import ApiError, bad_request, not_found
from producer.gateway.files import missing
from producer.gateway.filestore import Stored
from producer.gateway.pages import After, page
from producer.gateway.service import Here, Service

router = APIRouter(prefix="/v1/batches", tags=["openai"])
Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(max_length=64)]


class BatchBody(BaseModel):
    """OpenAI's body."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(max_length=100, description="a file that was uploaded with the purpose 'batch'")
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"] = Field("24h", description="rows are answered also after it")
    metadata: Annotated[dict[Name, Text], Field(max_length=16)] | None = None


@router.post("", summary="Answer a file of requests")
async def create(request: Request, body: BatchBody, here: Here, caller: Asking) -> dict[str, Any]:
    """Its rows wait behind requests, and are answered however long that takes."""
    here.limits.count(caller)
    stored = await here.in_thread(here.files.get, body.input_file_id, caller.name)
    if stored is None:
        raise missing(body.input_file_id, "input_file_id")
    asked = await here.in_thread(_model_of, stored, body.endpoint, here.settings.max_line_mb << 20)
    served = Served(owner=caller.name, input_file=stored.id, endpoint=body.endpoint, metadata=body.metadata or {})
    record = await here.in_thread(_claim, here, stored, here.model(asked), served)
    here.submitting.wake()
    request.state.entry.told |= {"batch": record.spec.batch, "file": stored.id, "model": record.spec.model}
    return outcomes.document(record, here.settings.folders)


@router.get("", summary="List batches, the newest first")
async def list_batches(
    here: Here, caller: Asking, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: After = None
) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        found = here.ledger.newest_first(caller.name)
        return page((outcomes.document(one, here.settings.folders) for one in found), limit, after)

    return await here.in_thread(read)


@router.get("/{batch_id}", summary="How a batch stands")
async def retrieve(batch_id: str, here: Here, caller: Asking) -> dict[str, Any]:
    return await here.in_thread(lambda: outcomes.document(_find(here, batch_id, caller.name), here.settings.folders))


@router.post("/{batch_id}/cancel", summary="End what has not been answered")
async def cancel(batch_id: str, here: Here, caller: Asking) -> dict[str, Any]:
    """What was answered by then is in the output file."""

    def stop() -> dict[str, Any]:
        record = _find(here, batch_id, caller.name)
        if not here.ledger.stop(record.spec.batch):
            state = outcomes.status(record)
            raise ApiError(409, f"the batch cannot be cancelled: its status is '{state}'", code="batch_ended")
        return outcomes.document(_find(here, batch_id, caller.name), here.settings.folders)

    told = await here.in_thread(stop)
    batch = batch_id.removeprefix(outcomes.BATCH)
    here.later(cancelling.cancel, batch, here.ledger, here.settings.folders)  # should we die, workers' audits go on
    return told


def _find(here: Service, batch_id: str, owner: str) -> Batch:
    record = outcomes.find(batch_id, owner, here.ledger)
    if record is None:
        raise not_found(f"there is no batch '{batch_id[:100]}'", "batch_id", "batch_not_found")
    return record


def _claim(here: Service, stored: Stored, model: str, served: Served) -> Batch:
    """A batch of its own for the file, whatever was submitted before."""
    settings = here.settings.model_copy(update={"model": model, "output_format": "openai"})
    spec = Claims(settings, here.ledger, served.owner).snapshot(stored.place, served=served)
    record = here.ledger.get(spec.batch)
    assert record is not None
    return record


def _model_of(stored: Stored, endpoint: str, longest: int) -> str | None:
    """The model that the first row names, for all of them. Raises ApiError where it is no row for `endpoint`."""
    try:
        row = rows.decode(_first_line(stored.place, longest), 0)
        if row.get("url") != endpoint:
            raise bad_request(f"the file's first row is not for {endpoint}: its url must be that", "endpoint")
        return rows.model(rows.body(row))
    except BadPrompt as error:
        raise bad_request(f"the file's first row: {error}", "input_file_id", error.code) from None


def _first_line(file: Path, longest: int) -> bytes:
    with file.open("rb") as stream:
        lines = iter(lambda: stream.readline(longest), b"")
        full = (line.removeprefix(b"\xef\xbb\xbf") for line in lines)
        for line in itertools.islice(full, 1000):
            if line.strip():
                return line.rstrip(b"\r\n")
    raise bad_request("the file holds no rows", "input_file_id", "empty_file")
