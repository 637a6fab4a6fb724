"""What all requests share while the service runs: settings, connections, keys, limits, and who waits for what.

Everything here belongs to one event loop. The ledger's connection is a blocking one: it is used in threads only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, ParamSpec, TypeVar, cast

from fastapi import Depends, Request
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import interactive, logs, queues
from contract.errors import DllmError
from contract.interactive import Capacity
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer.gateway import keys
from producer.gateway.dispatch import Dispatch
from producer.gateway.errors import not_found
from producer.gateway.filestore import FileStore
from producer.gateway.filters import Filters
from producer.gateway.keys import Keys
from producer.gateway.limits import Limits, Measured
from producer.gateway.loopback import is_loopback
from producer.gateway.submitting import Submitting

REFRESH_S = 1.0
"""Keys, models and capacity are looked at again this often."""
NONE = Measured(Capacity(workers=0, rows=0, running=0, waiting=0, tokens_per_s=0.0), own=0)

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """Made when the application starts, see `opened`."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, redis: Redis, known: Keys, judges: Filters) -> None:
        self.settings = settings
        self.ledger = ledger
        self.redis = redis
        self.names = ledger.redis.names
        self.keys = known
        self.needs_key = bool(known.known) or not is_loopback(settings.serve_host)
        """Once there was a key, or where others can ask too, nobody may without: also when the last one is revoked."""
        self.filters = judges
        self.limits = Limits(settings.serve_share)
        self.dispatch = Dispatch(redis, self.names)
        self.files = FileStore(settings.folders.files)
        self.submitting = Submitting(settings, ledger)
        self._background: list[asyncio.Task[None]] = []
        self._later: set[asyncio.Task[Any]] = set()
        self.measured: dict[str, Measured] = {}

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Files, hashes and the ledger: whatever would keep the event loop waiting."""
        return await asyncio.to_thread(work, *args, **kwargs)

    def later(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do it in a thread without anybody waiting; the service does not end before it."""
        task = asyncio.create_task(self.in_thread(work, *args, **kwargs))
        self._later.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._later.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logs.get().error("request_task_failed", exc_info=error)

    async def start(self) -> None:
        """Begin what goes on without a request."""
        with contextlib.suppress(RedisError):
            await self.measure()
        await self.in_thread(self.files.sweep)
        self.submitting.start()
        self._background = [asyncio.create_task(work()) for work in (self._refresh, self.dispatch.listen)]

    async def close(self) -> None:
        """End it."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(self.in_thread(self.submitting.stop), *self._later, return_exceptions=True)
        await self.dispatch.close()
        await self.redis.aclose()

    @property
    def whole(self) -> bool:
        """Does all go on that goes on without a request?"""
        return self.submitting.alive and not any(task.done() for task in self._background)

    @property
    def models(self) -> list[str]:
        """The models that may be asked for: the usual one, and those of living workers."""
        return sorted({self.settings.queue_model, *self.measured})

    def model(self, asked: str | None) -> str:
        """The model that a request names, by the last part of its path. Raises ApiError (404)."""
        name = (asked or self.settings.queue_model).rstrip("/").rsplit("/", 1)[-1]
        if name not in self.models:
            known = ", ".join(self.models)
            raise not_found(f"there is no model '{name[:100]}' here, but {known}", "model", "model_not_found")
        return name

    async def capacity(self, model: str) -> Measured:
        """What the model's workers can do; looked at anew when none was known a moment ago."""
        if not self.measured.get(model, NONE).capacity.workers:
            await self.measure()
        return self.measured.get(model, NONE)

    async def measure(self) -> None:
        """Look which workers live and what they can do. Raises RedisError in an outage."""
        alive = await self.in_thread(queues.workers, self.ledger.redis)
        named = {str(worker.vitals["model"]) for worker in alive if "model" in worker.vitals}
        models = named | ({self.settings.queue_model} if alive else set())
        found = {}
        for model in models:
            own = self.limits.rows(model)
            found[model] = Measured(await interactive.capacity(self.redis, self.names, model), own)
        self.measured = {model: one for model, one in found.items() if one.capacity.workers}

    async def _refresh(self) -> None:
        """Look at what changes outside, for ever."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self.keys = await self.in_thread(keys.load, self.settings)
                self.needs_key |= bool(self.keys.known)
                await self.measure()
            except (DllmError, RedisError) as error:  # what was known stays so
                logs.get().warning("refresh_failed", reason=str(error))


@contextlib.asynccontextmanager
async def opened(
    settings: ProducerSettings, ledger: Ledger, redis: Redis, known: Keys, judges: Filters
) -> AsyncIterator[Service]:
    """The service, at work until it is left."""
    service = Service(settings, ledger, redis, known, judges)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def _here(request: Request) -> Service:
    return cast(Service, request.app.state.service)


Here = Annotated[Service, Depends(_here)]
