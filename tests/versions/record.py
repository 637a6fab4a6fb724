"""Lets the version that it runs in begin a batch and records what is left: `python -m tests.versions.record FILE`.

To be run before a release that writes jobs, records or files otherwise than the last one recorded here.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis import Redis

from contract.errors import PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import Ledger
from contract.paths import Folders
from contract.queues import connect
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims, Look
from producer.submitter import submit
from tests.conftest import completion_row, failure_row
from tests.servers import free_port, running
from worker.intake import Intake
from worker.outputs import Outputs

ROWS: list[Mapping[str, Any]] = [
    {"id": "a", "prompt": "one", "topic": "carried along"},
    {"id": "b", "prompt": "two", "max_new_tokens": 8, "temperature": 0.5, "seed": 3},
    {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "three"}], "max_tokens": 4},
    },
    {"id": "d", "prompt": "four", "denoise_steps": 4},
    {"id": "e", "prompt": ""},
    *({"id": name, "prompt": name} for name in "fgh"),
]


def record(url: str, root: Path) -> dict[str, Any]:
    """A batch left in the middle: see `tests/test_versions.py`."""
    redis, folders = connect(url), Folders(root).create()
    ledger = Ledger(redis)
    settings = ProducerSettings(root=root, redis_url=url)
    file = folders.inputs / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = Claims(settings, ledger).take(file, Look.at(file))
    assert spec is not None
    assert submit(spec, ledger, settings)
    with (
        Intake(redis, ledger, WorkerSettings(root=root, redis_url=url, linger_ms=0, name="old")) as intake,
        Outputs(folders, ledger, intake.name) as outputs,
    ):
        answered, failed, later, _ = intake.take(4)
        error = PromptFailure(ErrorCode.MODEL_ERROR, "it failed")
        rows = [completion_row(0, "answer by an old version", id="a", prompt="one"), failure_row(1, id="b")]
        outputs.write([(spec.batch, row) for row in rows])
        intake.finish([answered])
        intake.fail(failed, error)
        intake.retry(later, error)
        return {"batch": spec.batch, "redis": keys(redis), "files": files(root)}


def keys(redis: Redis) -> dict[str, Any]:
    """All but the worker's registration, which tells of the machine and is over after some seconds."""
    names = sorted(name.decode() for name in redis.keys("*"))
    return {name: one_key(redis, name) for name in names if name not in ("rq:worker:old", "rq:workers")}


def one_key(redis: Redis, name: str) -> dict[str, Any]:
    kind = redis.type(name).decode()
    value: Any
    if kind == "string":
        value = text(redis.get(name))
    elif kind == "hash":
        value = {field.decode(): text(one) for field, one in sorted(redis.hgetall(name).items())}
    elif kind == "list":
        value = [text(one) for one in redis.lrange(name, 0, -1)]
    elif kind == "set":
        value = sorted(one.decode() for one in redis.smembers(name))
    else:
        value = [[member.decode(), score] for member, score in redis.zrange(name, 0, -1, withscores=True)]
    return {"type": kind, "value": value}


def text(raw: bytes) -> str | dict[str, str]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def files(root: Path) -> dict[str, str]:
    found = (file for file in sorted(root.rglob("*")) if file.is_file() and "logs" not in file.parts)
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in found}


if __name__ == "__main__":
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "server", port):
        left = record(f"redis://127.0.0.1:{port}/0", Path(folder) / "root")
    Path(sys.argv[1]).write_text(json.dumps(left, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
