"""The local server is shared, outlives its starter, is found again, and an unsafe server is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from contract import server
from contract.errors import ServerError, UsageError
from contract.settings import Settings

START = "import sys; from contract import server, settings; print(server.resolve(settings.Settings(root=sys.argv[1])))"


def pid_of(url: str) -> int:
    return int(Redis.from_url(url).info("server")["process_id"])


@pytest.fixture
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings without an address; whatever server they lead to is stopped afterwards."""
    settings = Settings(root=tmp_path_factory.mktemp("r"))
    yield settings
    server.stop(settings)


def test_an_address_in_the_settings_is_used_as_it_is(tmp_path: Path) -> None:
    assert server.resolve(Settings(root=tmp_path, redis_url="redis://elsewhere:1/2")) == "redis://elsewhere:1/2"
    assert not (tmp_path / ".redis").exists()


def test_the_local_server_keeps_everything_and_listens_to_this_machine_only(local: Settings) -> None:
    redis = server.open_redis(local)
    options = redis.config_get("appendonly", "appendfsync", "maxmemory-policy", "port", "save")
    assert options == {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "port": "0",
        "save": "",
    }
    assert (local.folders.redis / "server.sock").stat().st_mode & 0o077 == 0


def test_processes_that_start_at_once_share_one_server_that_outlives_them(local: Settings) -> None:
    starters = [
        subprocess.Popen([sys.executable, "-c", START, str(local.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    addresses = {starter.communicate(timeout=60)[0].strip() for starter in starters}
    assert [starter.returncode for starter in starters] == [0, 0, 0]
    assert addresses == {server.resolve(local)}
    assert Redis.from_url(addresses.pop()).ping()


def test_what_was_written_is_there_after_a_stop(local: Settings) -> None:
    server.open_redis(local).set("kept", "yes")
    assert server.stop(local)
    assert not server.stop(local)
    assert server.open_redis(local).get("kept") == b"yes"


def test_what_was_written_is_there_after_a_kill(local: Settings, wait_until: Callable[..., None]) -> None:
    redis = server.open_redis(local)
    redis.set("kept", "yes")
    os.kill(pid_of(server.resolve(local)), signal.SIGKILL)
    wait_until(lambda: not server._held(local.folders.redis))
    assert server.open_redis(local).get("kept") == b"yes"


def test_a_killed_server_is_started_anew(local: Settings, wait_until: Callable[..., None]) -> None:
    url = server.resolve(local)
    killed = pid_of(url)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not server._held(local.folders.redis))
    assert pid_of(server.resolve(local)) != killed


def test_a_record_whose_process_id_belongs_to_another_program_by_now_is_not_believed(local: Settings) -> None:
    folder = local.folders.redis
    folder.mkdir()
    (folder / "server.json").write_text(json.dumps({"url": f"unix://{folder}/server.sock", "pid": os.getpid()}))
    (folder / "server.sock").touch()
    assert server.open_redis(local).ping()


def test_a_lost_record_does_not_lead_to_a_second_server(local: Settings) -> None:
    first = pid_of(server.resolve(local))
    (local.folders.redis / "server.json").unlink()
    assert pid_of(server.resolve(local)) == first


def test_a_port_is_used_where_the_socket_path_would_be_too_long(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 30)
    root.mkdir()
    settings = Settings(root=root)
    try:
        url = server.resolve(settings)
        assert url.startswith("redis://127.0.0.1:")
        assert server.resolve(settings) == url
        assert Redis.from_url(url).config_get("bind") == {"bind": "127.0.0.1"}
    finally:
        assert server.stop(settings)


def test_a_server_of_another_root_on_our_old_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    roots = [tmp_path / (letter * 120) for letter in "ab"]
    settings = [Settings(root=root) for root in roots]
    for root in roots:
        root.mkdir()
    try:
        other = server.resolve(settings[0])
        assert not server._answers(other, settings[1].folders.redis)
    finally:
        server.stop(settings[0])


def test_a_folder_with_any_characters_in_its_name_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = Settings(root=tmp_path_factory.mktemp("r") / "a b%41?#")
    settings.root.mkdir()
    try:
        assert server.open_redis(settings).ping()
    finally:
        server.stop(settings)


def test_a_server_that_cannot_start_says_why(local: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_options", lambda folder: ["--no-such-option", "1"])
    with pytest.raises(ServerError, match=r"did not start: .*server\.log"):
        server.resolve(local)


def test_only_our_own_server_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not started here"):
        server.stop(Settings(root=tmp_path, redis_url="redis://127.0.0.1:1/0"))


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_is_refused_with_the_remedy(redis: Redis, policy: str) -> None:
    redis.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(ServerError, match=rf"{policy}.*CONFIG SET maxmemory-policy noeviction"):
            server.check(redis)
    finally:
        redis.config_set("maxmemory-policy", "noeviction")
    server.check(redis)


def test_a_password_is_never_printed(tmp_path: Path, redis_url: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for url in (f"redis://me:hunter2@127.0.0.1:{port}/0", "redis://me:hunter2@host:port", "hunter2"):
        with pytest.raises(ServerError) as caught:
            server.open_redis(Settings(root=tmp_path, redis_url=url))
        assert "hunter2" not in str(caught.value)
        assert "redis_url" in str(caught.value)


def test_a_wrong_password_is_named_as_such(redis: Redis, redis_url: str, tmp_path: Path) -> None:
    redis.config_set("requirepass", "right")
    try:
        with pytest.raises(ServerError, match="password"):
            server.open_redis(Settings(root=tmp_path, redis_url=redis_url + "?password=wrong"))
    finally:
        redis.execute_command("AUTH", "right")
        redis.config_set("requirepass", "")


def test_a_loading_server_is_waited_for(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"loading": 1}, {"loading": 1}, {"loading": 0, "maxmemory_policy": "allkeys-lru"}])
    monkeypatch.setattr(redis, "info", lambda: next(answers))
    with pytest.raises(ServerError, match="allkeys-lru"):
        server.check(redis)
