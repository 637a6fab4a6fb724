"""`/v1/models`: what may be asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from producer.gateway.auth import Asking
from producer.gateway.service import Here, Service

router = APIRouter(prefix="/v1/models", tags=["openai"])


@router.get("", summary="The models that may be asked for")
async def list_models(here: Here, caller: Asking) -> dict[str, Any]:
    """The service's usual one, and those of living workers; `workers` tells how many of them there are."""
    return {"object": "list", "data": [_model(name, here) for name in here.models]}


@router.get("/{model:path}", summary="One model")
async def retrieve_model(model: str, here: Here, caller: Asking) -> dict[str, Any]:
    return _model(here.model(model), here)


def _model(name: str, here: Service) -> dict[str, Any]:
    measured = here.measured.get(name)
    workers = measured.capacity.workers if measured else 0
    return {"id": name, "object": "model", "created": 0, "owned_by": "dllm-batch", "workers": workers}
