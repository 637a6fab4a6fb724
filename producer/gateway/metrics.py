"""`/metrics`: what the producer's side tells Prometheus (`producer.monitoring`), to who has a key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse, Response

from producer.gateway.auth import Asking

router = APIRouter(tags=["health"])


@router.get("/metrics", summary="Queues, batches, workers and Redis, for Prometheus", response_class=PlainTextResponse)
def metrics(request: Request, caller: Asking) -> Response:
    """The text format, or OpenMetrics where it is asked for."""
    return exposition(request.app.state.registry, request)


def exposition(registry: CollectorRegistry, request: Request) -> Response:
    """A scrape; to be called in a thread, for Redis is asked."""
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": kind})
