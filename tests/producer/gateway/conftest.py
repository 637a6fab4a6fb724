"""A service that listens, in a thread of the test, and workers that answer by script."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn

from contract import addresses, logs
from contract.ledger import Ledger
from contract.queues import connect
from contract.settings import ProducerSettings
from producer.gateway.app import create_app
from tests.producer.gateway.scripted import ScriptedWorker

PATIENCE_S = 20.0


class Listening:
    """A service at its address, and a client of it."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, redis_url: str) -> None:
        logs.set_up(settings, "serve", quiet=True)
        app = create_app(settings, ledger, lambda: addresses.async_client(redis_url))
        self.settings = settings
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE_S)
        self._thread.start()

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
        return self.client.post(path, json=body, **options)

    def chat(self, text: str = "hello", **values: Any) -> httpx2.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **values})

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        self._listener.close()
        assert not self._thread.is_alive()


@pytest.fixture
def listening(
    producer_settings: Callable[..., ProducerSettings], redis: Any, redis_url: str
) -> Iterator[Callable[..., Listening]]:
    """Start a service with settings of your own."""
    started: list[Listening] = []

    def start(**values: Any) -> Listening:
        started.append(Listening(producer_settings(**values), Ledger(connect(redis_url)), redis_url))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def worker(redis: Any, redis_url: str) -> Iterator[ScriptedWorker]:
    """A worker of the model `demo` with ten rows."""
    with ScriptedWorker(redis_url) as scripted:
        yield scripted


@pytest.fixture
def service(worker: ScriptedWorker, listening: Callable[..., Listening]) -> Listening:
    """A service with the usual settings and a worker."""
    return listening()
