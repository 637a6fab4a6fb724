"""Files: brought, listed, fetched, taken away."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import httpx2
import pytest

from producer.gateway import keys
from tests.producer.gateway.conftest import Listening

ROWS = b'{"prompt": "a"}\n' * 100


def upload(service: Listening, content: bytes = ROWS, name: str = "rows.jsonl", **options: object) -> httpx2.Response:
    files = {"file": (name, io.BytesIO(content))}
    return service.client.post("/v1/files", data={"purpose": "batch"}, files=files, **options)  # type: ignore[arg-type]


def test_a_file_comes_stays_and_goes(listening: Callable[..., Listening]) -> None:
    service = listening()
    content = bytes(range(256)) * 20_000  # more than is written at a time, with every byte in it
    told = upload(service, content, "../..\\näme?.JSONL").json()
    assert (told["object"], told["bytes"], told["purpose"]) == ("file", len(content), "batch")
    assert told["filename"] == "../..\\näme?.JSONL"
    assert service.client.get(f"/v1/files/{told['id']}").json() == told
    assert service.client.get(f"/v1/files/{told['id']}/content").content == content
    (folder,) = service.settings.folders.files.iterdir()
    assert folder.name == told["id"]
    again = listening()  # another process, or this one after a restart
    assert again.client.get(f"/v1/files/{told['id']}").json() == told
    assert service.client.delete(f"/v1/files/{told['id']}").json()["deleted"] is True
    assert list(service.settings.folders.files.iterdir()) == []
    for answer in (
        service.client.get(f"/v1/files/{told['id']}"),
        service.client.get(f"/v1/files/{told['id']}/content"),
        service.client.delete(f"/v1/files/{told['id']}"),
        service.client.get("/v1/files/..%2F..%2Fetc"),
        service.client.get("/v1/files/file-output-nothing"),
    ):
        assert answer.status_code == 404


def test_files_are_listed_a_page_at_a_time(listening: Callable[..., Listening]) -> None:
    service = listening()
    ids = [upload(service, name=f"{number}.jsonl").json()["id"] for number in range(5)]

    def listed(**query: object) -> dict[str, object]:
        return service.client.get("/v1/files", params=query).json()  # type: ignore[arg-type, no-any-return]

    def names(**query: object) -> list[str]:
        return [one["id"] for one in listed(**query)["data"]]  # type: ignore[attr-defined]

    assert names() == ids[::-1]
    assert names(order="asc") == ids
    assert (names(limit=2), listed(limit=2)["has_more"]) == (ids[:-3:-1], True)
    assert (names(limit=3, after=ids[3]), listed(limit=3, after=ids[3])["has_more"]) == (ids[2::-1], False)
    assert names(purpose="batch_output") == []
    assert service.client.get("/v1/files", params={"after": "nothing"}).status_code == 400
    assert service.client.get("/v1/files", params={"limit": 0}).json()["error"]["param"] == "limit"


def test_what_is_too_large_torn_or_no_form_leaves_nothing(listening: Callable[..., Listening]) -> None:
    service = listening(serve_max_file_mb=1)
    assert upload(service, b"a" * (1 << 20)).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(20):
            yield b"a" * 65536

    form = {"content-type": "multipart/form-data; boundary=x"}
    assert service.client.post("/v1/files", content=pieces(), headers=form).status_code == 413
    torn = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\naaa'
    for content, headers in (
        (torn, form),
        (b"", form),
        (b"--x\r\nnonsense", form),
        (b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"a" * 2000, form),
        (b"{}", {"content-type": "application/json"}),
        (b"{}", {"content-type": "multipart/form-data"}),
    ):
        answer = service.client.post("/v1/files", content=content, headers=headers)
        assert answer.status_code == 400, content[:50]
    files = {"file": ("a", b"a")}
    assert service.client.post("/v1/files", data={"purpose": "assistants"}, files=files).status_code == 400
    assert service.client.post("/v1/files", files=files).json()["error"]["param"] == "purpose"
    assert not service.settings.folders.files.exists() or not list(service.settings.folders.files.iterdir())


def test_a_full_disk_is_told(listening: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from producer.gateway.filestore import Receiving

    def full(self: Receiving, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Receiving, "write", full)
    service = listening()
    answer = upload(service)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
    assert list(service.settings.folders.files.iterdir()) == []


def test_a_key_sees_its_own_files_only(listening: Callable[..., Listening]) -> None:
    settings = listening().settings
    file = keys.place(settings)
    alice, bob = ({"Authorization": f"Bearer {keys.make(file, name, None, None)}"} for name in ("alice", "bob"))
    service = listening()
    file_id = upload(service, headers=alice).json()["id"]
    assert service.client.get(f"/v1/files/{file_id}", headers=alice).status_code == 200
    assert service.client.get(f"/v1/files/{file_id}", headers=bob).status_code == 404
    assert service.client.delete(f"/v1/files/{file_id}", headers=bob).status_code == 404
    assert service.client.get("/v1/files", headers=bob).json()["data"] == []
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert service.client.post("/v1/batches", json=body, headers=bob).status_code == 404
