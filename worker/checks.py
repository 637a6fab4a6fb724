"""What `worker check` looks at. Each check returns a line of facts, or raises an error that says what to do."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version

from contract import checkup, server, stores
from contract.errors import DllmError
from contract.ledger import Ledger
from contract.settings import WorkerSettings
from worker.devices import devices
from worker.model import open_model


def environment(config: WorkerSettings) -> str:
    """Python and library versions."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "redis", "rq"))
    return f"Python {platform.python_version()}, {libraries}, {os.cpu_count()} CPU cores"


def folders(config: WorkerSettings) -> str:
    """Folders exist and can be written, and there is room."""
    made = config.folders.create()
    for folder in (made.inputs, made.processed, made.logs):
        if not os.access(folder, os.W_OK):
            raise DllmError(f"{folder} cannot be written: change its owner or choose another --root")
        _refuse(checkup.disk(folder), str(folder))
    free = shutil.disk_usage(made.root).free >> 30
    return f"{made.root}, {free} GB free"


def outputs(config: WorkerSettings) -> str:
    """Outputs can be written where they go: in an object store a small object is put, read and deleted."""
    store = stores.of(config.folders.create())
    store.check()
    return store.shown("").rstrip("/")


def redis(config: WorkerSettings) -> str:
    """A server answers, does not evict keys, has room, keeps what it is told, and knows what time it is."""
    connection = server.open_redis(config)
    asked_at = time.time()
    _refuse(checkup.clock(Ledger(connection).now(), asked_at), "clock")
    info = connection.info()
    _refuse(checkup.memory(info), "memory")
    kept = checkup.persistence(info)
    if kept and not kept.note:
        _refuse(kept, "persistence")
    version = f"version {info.get('valkey_version') or info['redis_version']}"
    return f"{version}; note: {kept.what}; {kept.remedy}" if kept else version


def port(config: WorkerSettings) -> str:
    """Metrics and health can be served, where that is asked for."""
    if config.metrics_port is None:
        return "off (metrics_port)"
    from contract.monitoring import Monitor, registry_of

    with Monitor(config, registry_of(), list, list):
        return f"http://{config.metrics_host}:{config.metrics_port} is free"


def model(config: WorkerSettings) -> str:
    """The checkpoint loads on every device, and so many rows fit into memory."""
    return "; ".join(_on_device(config.model_copy(update={"device": device})) for device in devices(config.device))


def _on_device(config: WorkerSettings) -> str:
    opened = open_model(config)
    facts = ", ".join(f"{name} {value}" for name, value in opened.describe().items())
    return f"{facts} ({opened.engine.memory.budget >> 20} MB for keys and values)"


def _refuse(found: checkup.Trouble | None, where: str) -> None:
    if found is not None:
        raise DllmError(f"{where}: {found.what}: {found.remedy}")


CHECKS: dict[str, Callable[[WorkerSettings], str]] = {
    "environment": environment,
    "folders": folders,
    "outputs": outputs,
    "redis": redis,
    "metrics": port,
    "model": model,
}
