"""For whoever keeps the service running: does the process live, and can it answer?"""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import APIRouter
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from producer.gateway.service import Here

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="Does the process live?", responses={503: {"description": "Start it anew"}})
async def healthz(here: Here) -> Response:
    """All that goes on beside requests does so."""
    return JSONResponse({"status": "ok" if here.whole else "broken"}, 200 if here.whole else 503)


@router.get("/readyz", summary="Can requests be answered?", responses={503: {"description": "Not at the moment"}})
async def readyz(here: Here) -> Response:
    """Redis answers, and a worker of the usual model is alive."""
    told: dict[str, Any] = {"redis": False, "workers": 0}
    with contextlib.suppress(RedisError):
        told = {
            "redis": bool(await here.redis.ping()),
            "workers": (await here.capacity(here.settings.queue_model)).capacity.workers,
        }
    ready = told["redis"] and told["workers"] > 0
    return JSONResponse({"status": "ok" if ready else "unavailable", **told}, 200 if ready else 503)
