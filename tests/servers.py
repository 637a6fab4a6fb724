"""Servers of a test's own: with access rules, behind TLS, watched by a Sentinel."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from contract import server
from tests.conftest import wait_for


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server on a port of this machine; killed at the end. `options` may begin with the path of a configuration."""
    folder.mkdir(exist_ok=True)
    fixed = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    command = [str(server.find_binary()), *options, *fixed]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port))
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def sentinel(folder: Path, port: int, primary: int, service: str, password: str, own_password: str) -> Iterator[None]:
    """One Sentinel that suffices, hurried, for the server on the port `primary`; up when it knows of the replica."""
    folder.mkdir()
    configuration = folder / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nrequirepass {own_password}\n"
        f"sentinel monitor {service} 127.0.0.1 {primary} 1\nsentinel auth-pass {service} {password}\n"
        f"sentinel down-after-milliseconds {service} 500\nsentinel failover-timeout {service} 2000\n"
    )
    command = [str(server.find_binary()), str(configuration), "--sentinel"]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    asking = Redis(port=port, password=own_password)
    try:
        wait_for(lambda: _replicas(asking, service))
        yield
    finally:
        asking.close()
        process.send_signal(signal.SIGKILL)
        process.wait()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for `localhost` that nobody but itself vouches for, and its key."""
    folder.mkdir(exist_ok=True)
    made, key = folder / "certificate.pem", folder / "key.pem"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", *kind, *subject, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True
    )
    return made, key


@contextlib.contextmanager
def behind_tls(port: int, made: Path, key: Path) -> Iterator[int]:
    """A port that speaks TLS in front of the server on `port`, for binaries that were built without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, context, port), daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.close()


def _accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, port), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as outside:
        outside.settimeout(0.02)
        with socket.create_connection(("127.0.0.1", port)) as inside:
            inside.settimeout(0.02)
            while _passed_on(outside, inside) and _passed_on(inside, outside):
                pass


def _passed_on(source: socket.socket, target: socket.socket) -> bool:
    """Pass on what `source` has to say now; False when it has hung up. One thread for both ways: TLS allows no two."""
    try:
        data = source.recv(1 << 16)
    except TimeoutError:
        return True
    if data:
        target.sendall(data)
    return bool(data)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _replicas(asking: Redis, service: str) -> bool:
    try:
        return any(not found["is_disconnected"] for found in asking.sentinel_slaves(service))
    except RedisError:
        return False
