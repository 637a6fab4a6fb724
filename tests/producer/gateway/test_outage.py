"""Redis goes away and comes back while the service runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from contract.ledger import Ledger
from contract.queues import connect
from contract.settings import ProducerSettings
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import TEXT, ScriptedWorker
from tests.servers import free_port, running


def test_while_redis_is_away_it_is_unavailable_and_afterwards_goes_on(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """What was lost with the server is lost; nobody waits for it longer than for anything else."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    settings = ProducerSettings(root=tmp_path, redis_url=url)
    settings.folders.create()
    with contextlib.ExitStack() as stack:
        with running(tmp_path / "redis", port), ScriptedWorker(url):
            service = Listening(settings, Ledger(connect(url)), url)
            stack.callback(service.stop)
            assert service.chat().status_code == 200
        answer = service.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert service.client.get("/readyz").status_code == 503
        assert service.client.get("/healthz").status_code == 200
        stack.enter_context(running(tmp_path / "redis", port))
        stack.enter_context(ScriptedWorker(url))
        wait_until(lambda: service.chat().status_code == 200)
        assert service.chat().json()["choices"][0]["message"]["content"] == TEXT
        service.stop()
