"""The audit log: a line for each request, whatever came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import TEXT, ScriptedWorker
from tests.producer.gateway.test_batches import brought, create, row

KEY = {"Authorization": "Bearer a-secret-key"}


def lines(service: Listening) -> list[dict[str, Any]]:
    """Those of requests; batches that were asked for have lines of their own."""
    file = service.settings.folders.logs / "audit.jsonl"
    text = file.read_text() if file.exists() else ""  # it begins with its first line
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == "request"]


def test_a_request_is_a_line_without_keys_and_texts(
    worker: ScriptedWorker, listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    service = listening(serve_api_key="a-secret-key")
    service.client.headers.update(KEY)
    answer = service.chat("a private question")
    service.chat("a private question", stream=True)
    service.chat(temperature=-1)
    service.client.get("/v1/models", headers={"Authorization": "Bearer another"})
    batch = create(service, brought(service, [row(0)])).json()["id"]
    wait_until(lambda: len(lines(service)) == 6)  # they are written when the answer is on its way
    told = lines(service)
    assert [line["status"] for line in told] == [200, 200, 400, 401, 200, 200]
    assert [line["caller"] for line in told] == [*["environment"] * 3, None, *["environment"] * 2]
    first = told[0]
    assert first["request"] == answer.headers["x-request-id"]
    assert (first["path"], first["model"], first["choices"]) == ("/v1/chat/completions", "demo", 1)
    assert first["usage"] == answer.json()["usage"] == told[1]["usage"]
    assert first["prompt_job"] == worker.seen[0].batch
    assert f"batch_{told[-1]['batch']}" == batch
    text = json.dumps(told)
    for secret in ("a-secret-key", "another", "private", TEXT):
        assert secret not in text


def test_texts_are_there_where_they_are_asked_for(
    worker: ScriptedWorker, listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    service = listening(log_prompts=True)
    service.chat("a question", n=2)
    wait_until(lambda: lines(service))
    (line,) = lines(service)
    assert (line["prompts"], line["outputs"]) == (["a question"], [TEXT, TEXT])
