"""The application: addresses, errors and what surrounds every request, put together.

`create_app` is the front of the package. To add addresses, write a module with an `APIRouter`, take `Here` (the
service) and `Asking` (who asks; 401 without a valid key) as parameters, and include the router here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from importlib import metadata

from fastapi import FastAPI
from redis.asyncio import Redis

from contract import audit
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer import monitoring
from producer.dashboard import app as dashboard
from producer.gateway import (
    batches,
    chat,
    completions,
    errors,
    files,
    filters,
    generate,
    health,
    keys,
    metrics,
    models,
)
from producer.gateway.door import Door, Entry
from producer.gateway.service import opened

MEGABYTE = 1 << 20
DASHBOARD = "/dashboard"
ROUTERS = tuple(one.router for one in (generate, chat, completions, models, files, batches, health, metrics))


def create_app(settings: ProducerSettings, ledger: Ledger, redis: Callable[[], Redis]) -> FastAPI:
    """The application. `redis` makes its connection inside the event loop; `ledger` is used in threads.

    Raises SettingsError for keys or filters that cannot be read.
    """
    known, judges = keys.load(settings), filters.load(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings, ledger, redis(), known, judges) as service:
            app.state.service = service
            yield

    def most(path: str) -> int:
        return (settings.serve_max_file_mb if path == "/v1/files" else settings.serve_max_body_mb) * MEGABYTE

    app = FastAPI(
        title="dllm-batch",
        summary="Diffusion language models behind OpenAI's interface",
        version=metadata.version("dllm-batch"),
        lifespan=lifespan,
    )
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router, responses=errors.DOCUMENTED)
    app.state.registry = monitoring.registry(ledger, settings)
    if settings.serve_dashboard:
        app.mount(DASHBOARD, dashboard.create_app(settings, ledger, settings.serve_host))
    app.add_middleware(Door, record=_record, most=most)
    return app


def _record(entry: Entry) -> None:
    """A page that is open asks every two seconds, and changes nothing by that."""
    if not (entry.method == "GET" and entry.path.startswith(f"{DASHBOARD}/")):
        audit.requested(entry.document())
