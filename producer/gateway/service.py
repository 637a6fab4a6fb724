"""What all requests share while the service runs: settings, connections, keys, and who waits for what.

Everything here belongs to one event loop. The ledger's connection is a blocking one: it is used in threads only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, ParamSpec, TypeVar, cast

from fastapi import Depends, Request
from redis.asyncio import Redis

from contract import logs, queues
from contract.errors import DllmError
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer.gateway import keys
from producer.gateway.keys import Keys

REFRESH_S = 1.0
"""Keys and capacity are looked at again this often."""

P = ParamSpec("P")
T = TypeVar("T")


class Service:
    """Made when the application starts, see `opened`."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, redis: Redis, known: Keys) -> None:
        self.settings = settings
        self.ledger = ledger
        self.redis = redis
        self.keys = known

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Files, hashes and the ledger: whatever would keep the event loop waiting."""
        return await asyncio.to_thread(work, *args, **kwargs)

    async def workers(self) -> int:
        """How many living workers serve the usual model."""
        found = await self.in_thread(queues.workers, self.ledger.redis)
        return sum(worker.serves(self.settings.queue_model) for worker in found)

    async def refresh(self) -> None:
        """Look at what changes outside, for ever."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self.keys = await self.in_thread(keys.load, self.settings)
            except DllmError as error:  # those that were known stay so
                logs.get().warning("keys cannot be read", reason=str(error))


@contextlib.asynccontextmanager
async def opened(settings: ProducerSettings, ledger: Ledger, redis: Redis) -> AsyncIterator[Service]:
    """The service, at work until it is left."""
    service = Service(settings, ledger, redis, await asyncio.to_thread(keys.load, settings))
    refreshing = asyncio.create_task(service.refresh())
    try:
        yield service
    finally:
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)
        await redis.aclose()


def _here(request: Request) -> Service:
    return cast(Service, request.app.state.service)


Here = Annotated[Service, Depends(_here)]
