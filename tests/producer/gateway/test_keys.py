"""API keys, who may ask without one, and what is kept of requests."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from contract.errors import DllmError, SettingsError, UsageError
from contract.ledger import Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings
from producer import listening
from producer.gateway import keys
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import ScriptedWorker


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "configs" / "keys.json"
    key = keys.make(file, "alice", 60, None)
    other = keys.make(file, "alice", None, 2)
    keys.make(file, "bob", None, None)
    assert key != other
    text = file.read_text()
    assert key not in text
    assert key[5:] not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    known = keys.Keys(keys.read(file).keys)
    found = known.find(key)
    assert found is not None
    assert (found.name, found.requests_per_minute, found.concurrent) == ("alice", 60, None)
    assert known.find(key[:-1]) is None
    assert known.find("") is None
    assert keys.make(file, "alice", None, None, replace=True)
    assert keys.Keys(keys.read(file).keys).find(key) is None
    assert keys.revoke(file, "alice") == 1
    assert keys.revoke(file, "alice") == 0
    assert [one.name for one in keys.read(file).keys] == ["bob"]


def test_the_command_makes_lists_and_revokes(run: Callable[..., Result], folders: Folders) -> None:
    made = run("key", "alice", "--requests-per-minute", "60")
    assert made.exit_code == 0
    assert made.stdout.startswith("dllm-")
    other = json.loads(run("key", "bob", "--json").stdout)
    assert keys.Keys(keys.read(folders.configs / "keys.json").keys).find(other["key"]) is not None
    listed = run("key").stdout
    assert "alice" in listed
    assert "60" in listed
    assert made.stdout.strip() not in listed
    assert [one["name"] for one in json.loads(run("key", "--json").stdout)["keys"]] == ["alice", "bob"]
    assert "1 revoked" in run("key", "alice", "--revoke").stdout
    assert run("key", "alice", "--revoke").exit_code == 2


def test_without_keys_it_answers_as_localhost_only(service: Listening) -> None:
    """Else a web page whose name leads here could ask in its reader's browser."""
    for host, status in (("localhost", 200), ("[::1]:80", 200), ("127.0.0.2", 200), ("evil.example", 421)):
        assert service.client.get("/v1/models", headers={"host": host}).status_code == status


def test_wrong_names_and_files_are_told(tmp_path: Path) -> None:
    for name in ("", "a b", "environment", "x" * 65):
        with pytest.raises(UsageError, match="cannot be a key's name"):
            keys.make(tmp_path / "keys.json", name, None, None)
    (tmp_path / "keys.json").write_text("{")
    with pytest.raises(SettingsError, match="keys cannot be read"):
        keys.read(tmp_path / "keys.json")


def test_who_has_no_key_is_told_so(worker: ScriptedWorker, listening: Callable[..., Listening]) -> None:
    service = listening(serve_api_key="secret")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        for answer in (
            service.client.post("/generate", json={"prompt": "a"}, headers=headers),
            service.client.get("/v1/models", headers=headers),
            service.client.get("/v1/files", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
    right = service.client.post("/generate", json={"prompt": "a"}, headers={"Authorization": "Bearer secret"})
    assert right.status_code == 200
    assert service.client.get("/healthz").status_code == 200


def test_keys_that_are_made_and_revoked_count_without_a_restart(
    worker: ScriptedWorker, listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    service = listening()
    assert service.client.get("/v1/models").status_code == 200
    file = keys.place(service.settings)
    key = keys.make(file, "alice", None, None)
    wait_until(lambda: service.client.get("/v1/models").status_code == 401)
    alice = {"Authorization": f"Bearer {key}"}
    assert service.client.get("/v1/models", headers=alice).status_code == 200
    keys.make(file, "bob", None, None)
    keys.revoke(file, "alice")
    wait_until(lambda: service.client.get("/v1/models", headers=alice).status_code == 401)


def test_who_revokes_the_last_key_does_not_open_the_service_to_everybody(
    worker: ScriptedWorker, listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    key = keys.make(keys.place(listening().settings), "alice", None, None)
    service = listening()
    keys.revoke(keys.place(service.settings), "alice")
    alice = {"Authorization": f"Bearer {key}"}
    wait_until(lambda: service.client.get("/v1/models", headers=alice).status_code == 401)
    assert service.client.get("/v1/models").status_code == 401


def test_limits_of_a_key(worker: ScriptedWorker, listening: Callable[..., Listening]) -> None:
    service = listening(serve_requests_per_minute=2)
    assert [service.chat().status_code for _ in range(3)] == [200, 200, 429]
    answer = service.chat()
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60


def test_without_a_key_only_loopback_is_listened_on(
    producer_settings: Callable[..., ProducerSettings], ledger: Ledger
) -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(UsageError, match="without an API key only this machine may ask"):
            listening.serve(producer_settings(serve_host=host), ledger)


def test_an_address_that_is_taken_is_told(
    producer_settings: Callable[..., ProducerSettings], ledger: Ledger, service: Listening
) -> None:
    port = int(service.url.rpartition(":")[2])
    with pytest.raises(DllmError, match=f"cannot listen on 127.0.0.1:{port}"):
        listening.serve(producer_settings(serve_port=port), ledger)
