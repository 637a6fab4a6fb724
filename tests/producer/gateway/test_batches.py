"""Batches over HTTP: made of uploaded files, told of in OpenAI's words, kept by ledger and disk alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract import sealing, stores
from contract.jobs import Completion
from contract.ledger import Ledger, Mark
from contract.paths import Folders
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import ScriptedWorker
from tests.producer.gateway.test_files import upload


def row(number: int, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"hello {number}"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"model": "demo", **asked, **body}}


def brought(service: Listening, rows: list[dict[str, Any]]) -> str:
    content = "".join(json.dumps(one) + "\n" for one in rows).encode()
    return str(upload(service, content).json()["id"])


def create(service: Listening, file_id: str, **values: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **values}
    return service.post("/v1/batches", body)


def status(service: Listening, batch: str) -> dict[str, Any]:
    told: dict[str, Any] = service.client.get(f"/v1/batches/{batch}").json()
    return told


def answer(batch: str, rows: int, ledger: Ledger, folders: Folders, completion: Callable[..., Completion]) -> None:
    """What workers do with the rows from 0 on."""
    with stores.of(folders).segment(batch, "worker") as segment:
        asked = [{"role": "user", "content": "hello"}]
        segment.append([completion(index, id=f"r{index}", prompt=asked) for index in range(rows)])
    with ledger.redis.pipeline() as pipe:
        for index in range(rows):
            ledger.mark(pipe, batch, index, Mark.DONE)
        pipe.execute()
    sealing.seal(batch, ledger, folders)


@pytest.mark.parametrize("store", [False, True], ids=["folder", "store"])
@pytest.mark.usefixtures("worker")
def test_a_batch_from_its_file_to_its_outputs(
    listening: Callable[..., Listening],
    ledger: Ledger,
    completion: Callable[..., Completion],
    wait_until: Callable[..., None],
    tmp_path: Path,
    store: bool,
) -> None:
    service = listening(outputs_url=f"file://{tmp_path}/store" if store else None)
    folders = service.settings.folders
    file_id = brought(service, [row(0), row(1), row(2, temperature=-1)])
    told = create(service, file_id, metadata={"for": "me"}).json()
    batch = told["id"]
    assert (told["object"], told["endpoint"], told["metadata"]) == ("batch", "/v1/chat/completions", {"for": "me"})
    assert told["input_file_id"] == file_id
    assert told["status"] in ("validating", "in_progress")
    assert told["expires_at"] - told["created_at"] == 86_400
    wait_until(lambda: status(service, batch)["request_counts"] == {"total": 3, "completed": 0, "failed": 1})
    assert status(service, batch)["status"] == "in_progress"
    assert service.client.delete(f"/v1/files/{file_id}").status_code == 200  # the batch has its own copy
    answer(batch.removeprefix("batch_"), 2, ledger, folders, completion)
    told = status(service, batch)
    assert told["status"] == "completed"
    assert told["completed_at"] >= told["finalizing_at"] >= told["created_at"]
    outputs = service.client.get(f"/v1/files/{told['output_file_id']}/content").text.splitlines()
    assert [json.loads(line)["custom_id"] for line in outputs] == ["r0", "r1"]
    body = json.loads(outputs[0])["response"]["body"]
    assert (body["object"], body["choices"][0]["message"]["content"]) == ("chat.completion", "output 0")
    (error,) = service.client.get(f"/v1/files/{told['error_file_id']}/content").text.splitlines()
    assert json.loads(error)["response"]["status_code"] == 400
    listed = service.client.get("/v1/files").json()["data"]
    assert [one["purpose"] for one in listed] == ["batch_output", "batch_output"]
    assert service.client.get(f"/v1/files/{told['output_file_id']}").json()["bytes"] > 0
    assert service.client.delete(f"/v1/files/{told['output_file_id']}").status_code == 200
    assert status(service, batch)["output_file_id"] is None
    assert service.post(f"/v1/batches/{batch}/cancel", {}).status_code == 409


def test_a_batch_outlives_the_service(
    worker: ScriptedWorker,
    listening: Callable[..., Listening],
    ledger: Ledger,
    completion: Callable[..., Completion],
    wait_until: Callable[..., None],
) -> None:
    """The first one dies before the file was read to its end: there was no room for more rows. The next one goes on."""
    first = listening(max_queued=2)
    file_id = brought(first, [row(number) for number in range(6)])
    batch = create(first, file_id).json()["id"]
    wait_until(lambda: status(first, batch)["request_counts"]["total"] == 2)
    first.stop()
    second = listening(max_queued=100)
    wait_until(lambda: (record := ledger.get(batch.removeprefix("batch_"))) and record.counts.total == 6)
    answer(batch.removeprefix("batch_"), 6, ledger, second.settings.folders, completion)
    assert status(second, batch)["status"] == "completed"
    assert [one["id"] for one in second.client.get("/v1/batches").json()["data"]] == [batch]


def test_a_batch_is_cancelled(service: Listening, ledger: Ledger, wait_until: Callable[..., None]) -> None:
    batch = create(service, brought(service, [row(0), row(1)])).json()["id"]
    wait_until(lambda: status(service, batch)["request_counts"]["total"] == 2)
    assert service.post(f"/v1/batches/{batch}/cancel", {}).json()["status"] in ("cancelling", "cancelled")
    wait_until(lambda: status(service, batch)["status"] == "cancelled")
    told = status(service, batch)
    assert told["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    lines = service.client.get(f"/v1/files/{told['error_file_id']}/content").text.splitlines()
    assert {json.loads(line)["error"]["code"] for line in lines} == {"batch_cancelled"}
    assert told["output_file_id"] is None


def test_batches_are_listed_a_page_at_a_time(service: Listening) -> None:
    file_id = brought(service, [row(0)])
    made = [create(service, file_id).json()["id"] for _ in range(3)]
    assert len(set(made)) == 3  # the same file again is another batch, as with OpenAI
    first = service.client.get("/v1/batches", params={"limit": 2}).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (made[:0:-1], True)
    rest = service.client.get("/v1/batches", params={"after": first["last_id"]}).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == (made[:1], False)


def test_what_cannot_become_a_batch_is_refused(service: Listening) -> None:
    chat = brought(service, [row(0)])
    for file_id, values, code, param in (
        ("file-nothing", {}, 404, "input_file_id"),
        (chat, {"endpoint": "/v1/completions"}, 400, "endpoint"),
        (chat, {"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        (chat, {"completion_window": "1h"}, 400, "completion_window"),
        (chat, {"metadata": {"a": 3}}, 400, "metadata"),
        (chat, {"unknown": 1}, 400, "unknown"),
        (str(upload(service, b"\n \n").json()["id"]), {}, 400, "input_file_id"),
        (str(upload(service, b"not json\n").json()["id"]), {}, 400, "input_file_id"),
        (str(upload(service, b'{"prompt": "a"}\n').json()["id"]), {}, 400, "endpoint"),
        (brought(service, [row(0, model="gpt-9")]), {}, 404, "model"),
    ):
        answer = create(service, file_id, **values)
        assert (answer.status_code, answer.json()["error"]["param"]) == (code, param), answer.text
    assert service.client.get("/v1/batches").json()["data"] == []
    assert service.client.get("/v1/batches/batch_nothing").status_code == 404
    assert service.post("/v1/batches/nothing/cancel", {}).status_code == 404
