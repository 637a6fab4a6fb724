"""Runs the HTTP service, or the page, until told to stop: `producer serve` and `producer dashboard` but for options.

The only module outside `producer.gateway` and `producer.dashboard` that knows of them. Importing it imports neither
FastAPI nor uvicorn, which are not needed, and may not be there, for anything else.
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
    from fastapi import FastAPI

NEEDED = ("fastapi", "uvicorn", "python_multipart", "jinja2")
INSTALL = "this needs FastAPI and uvicorn: pip install 'dllm-batch[serve]'"
BACKLOG = 2048
SHOWN_S = 5.0


def require() -> None:
    """Raises UsageError where the service's libraries are not installed."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise UsageError(INSTALL)


def serve(settings: ProducerSettings, ledger: Ledger) -> None:
    """Answer requests until SIGTERM or Ctrl-C; answers under way then have `serve_grace_s` to end.

    Raises UsageError where that would be open to anybody, DllmError where the address is not to be had.
    """
    from producer.gateway.app import create_app

    url = server.resolve(settings)
    with _listening(settings, settings.serve_host, settings.serve_port) as listener:
        _run(create_app(settings, ledger, lambda: addresses.async_client(url)), listener, settings.serve_grace_s)


def show(settings: ProducerSettings, ledger: Ledger) -> None:
    """The page alone, until SIGTERM or Ctrl-C. Raises as `serve` does."""
    from producer.dashboard.app import create_app

    host = settings.dashboard_host
    with _listening(settings, host, settings.dashboard_port) as listener:
        _run(create_app(settings, ledger, host), listener, SHOWN_S)


def _run(app: FastAPI, listener: socket.socket, grace_s: float) -> None:
    import uvicorn

    logging.getLogger("uvicorn").setLevel("WARNING")
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, math.ceil(grace_s)),
        timeout_keep_alive=75,
    )
    service = uvicorn.Server(config)
    host, port = listener.getsockname()[:2]
    logs.get().info("serving", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
    service.run(sockets=[listener])
    if not service.started:
        raise DllmError("the service did not start: its log says why")
    logs.get().info("serving_stopped")


def _listening(settings: ProducerSettings, host: str, port: int) -> socket.socket:
    from producer.gateway import keys
    from producer.gateway.loopback import is_loopback

    if not keys.load(settings).known and not is_loopback(host):
        raise UsageError(
            f"without an API key only this machine may ask: make one with `producer key NAME` before "
            f"listening on {host}, or listen on 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Its connections have it too. asyncio sets it only where a socket's protocol is spelled out, and without it
        # the second half of an answer waits for the client's delayed acknowledgement of the first: 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise DllmError(f"cannot listen on {host}:{port} ({error}): name another with --host or --port") from None
