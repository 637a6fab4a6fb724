"""Runs the HTTP service until it is told to stop: `producer serve`, without its options.

The only module outside `producer.gateway` that knows of it. Importing it imports neither FastAPI nor uvicorn, which are
not needed, and may not be there, for anything else.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import socket
from typing import TYPE_CHECKING

from contract import addresses, logs, server
from contract.errors import DllmError, UsageError
from contract.ledger import Ledger
from contract.settings import ProducerSettings

if TYPE_CHECKING:
    import uvicorn

NEEDED = ("fastapi", "uvicorn", "python_multipart")
INSTALL = "the service needs FastAPI and uvicorn: pip install 'dllm-batch[serve]'"
BACKLOG = 2048


def require() -> None:
    """Raises UsageError where the service's libraries are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise UsageError(INSTALL)


def serve(settings: ProducerSettings, ledger: Ledger) -> None:
    """Answer requests until SIGTERM or Ctrl-C; answers under way then have `serve_grace_s` to end.

    Raises UsageError where that would be open to anybody, DllmError where the address is not to be had.
    """
    from producer.gateway import keys
    from producer.gateway.loopback import is_loopback

    if not keys.load(settings).known and not is_loopback(settings.serve_host):
        raise UsageError(
            f"without an API key only this machine may ask: make one with `producer key NAME` before "
            f"listening on {settings.serve_host}, or listen on 127.0.0.1"
        )
    with _listening(settings) as listener:
        host, port = listener.getsockname()[:2]
        logs.get().info("serving", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
        service = _server(settings, ledger)
        service.run(sockets=[listener])
    if not service.started:
        raise DllmError("the service did not start: its log says why")
    logs.get().info("serving_stopped")


def _server(settings: ProducerSettings, ledger: Ledger) -> uvicorn.Server:
    import uvicorn

    from producer.gateway.app import create_app

    logging.getLogger("uvicorn").setLevel("WARNING")
    url = server.resolve(settings)
    app = create_app(settings, ledger, lambda: addresses.async_client(url))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, math.ceil(settings.serve_grace_s)),
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)


def _listening(settings: ProducerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.serve_host else socket.AF_INET
    try:
        listener = socket.create_server((settings.serve_host, settings.serve_port), family=family, backlog=BACKLOG)
        # Its connections have it too. asyncio sets it only where a socket's protocol is spelled out, and without it
        # the second half of an answer waits for the client's delayed acknowledgement of the first: 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        where = f"{settings.serve_host}:{settings.serve_port}"
        raise DllmError(f"cannot listen on {where} ({error}): name another with --host or --port") from None
