"""A server on a network: password, access rules, TLS, fail-over; what is said when one of them is not right."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from typer.testing import CliRunner

from contract import addresses, server
from contract.errors import ServerError
from contract.ledger import BatchState, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims
from producer.cli import app
from producer.doctor import examine
from producer.submitter import submit
from tests.conftest import completion_row
from tests.servers import behind_tls, certificate, free_port, running, sentinel
from worker.intake import Intake
from worker.outputs import Outputs

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
SECRET = "hunter2"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A server that only its password opens."""
    port = free_port()
    with running(tmp_path / "server", port, "--requirepass", SECRET):
        yield port


@pytest.fixture
def admin(port: int) -> Iterator[Redis]:
    with Redis(port=port, password=SECRET) as client:
        yield client


def refusal(folders: Folders, url: str) -> str:
    with pytest.raises(ServerError) as caught:
        server.open_redis(ProducerSettings(root=folders.root, redis_url=url))
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    assert "redis_url" in message
    return message


def live(folders: Folders, url: str) -> None:
    """A batch's whole life, from its file to its publishing, with a look by the doctor."""
    settings = ProducerSettings(root=folders.root, redis_url=url)
    ledger = Ledger(server.open_redis(settings))
    file = folders.root / "three.txt"
    file.write_text("a\nb\nc\n")
    spec = Claims(settings, ledger).snapshot(file)
    assert submit(spec, ledger, settings)
    work(WorkerSettings(root=folders.root, redis_url=url, name="w", linger_ms=0), ledger)
    batch = ledger.get(spec.batch)
    assert batch is not None
    assert (batch.state, batch.counts.done) == (BatchState.DONE, 3)
    assert [one.kind for one in examine(settings, fix=True) if one.kind != "disk" and not one.note] == []


def work(settings: WorkerSettings, ledger: Ledger) -> None:
    redis = server.open_redis(settings)
    with Intake(redis, ledger, settings) as intake, Outputs(settings.folders, ledger, intake.name) as outputs:
        intake.reconciler.run()
        while rows := intake.take(2, wait_s=0.5):
            outputs.write([(row.batch, completion_row(row.index)) for row in rows])
            assert intake.finish(rows) == len(rows)
            outputs.sealed_if_complete(row.batch for row in rows)


# Password and access rules


def test_a_password_in_the_address_opens_the_server(folders: Folders, port: int) -> None:
    live(folders, f"redis://:{SECRET}@127.0.0.1:{port}/0")


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
def test_a_wrong_password_is_one_line_with_the_remedy(folders: Folders, port: int, login: str) -> None:
    assert "correct user and password" in refusal(folders, f"redis://{login}127.0.0.1:{port}/0")


def rules() -> list[str]:
    """Those that the operations guide gives the user `dllm`."""
    found = re.search(r"^ACL SETUSER dllm (.*)$", OPERATIONS, flags=re.MULTILINE)
    assert found
    return found[1].replace("PASSWORD", SECRET).split()


def test_the_documented_access_rules_are_enough_for_all_that_is_done(folders: Folders, port: int, admin: Redis) -> None:
    admin.execute_command("ACL", "SETUSER", "dllm", *rules())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live(folders, f"redis://dllm:{SECRET}@127.0.0.1:{port}/0")
    denied = [entry for entry in admin.acl_log() if entry["reason"] in ("command", "key")]
    assert denied == []


@pytest.mark.parametrize(
    "missing", ["-info", "-eval", "-set", "-zadd", "-setbit", "resetkeys ~dllm:*", "resetkeys ~rq:*"]
)
def test_a_missing_permission_is_one_line_with_the_remedy(
    folders: Folders, port: int, admin: Redis, missing: str
) -> None:
    admin.execute_command("ACL", "SETUSER", "dllm", *rules(), *missing.split())
    message = refusal(folders, f"redis://dllm:{SECRET}@127.0.0.1:{port}/0")
    assert "lacks a permission" in message
    assert "docs/operations.md" in message
    assert admin.dbsize() == 0


# TLS


@pytest.fixture
def secured(tmp_path: Path, port: int) -> Iterator[tuple[int, Path]]:
    """The same server behind TLS: port and certificate."""
    made, key = certificate(tmp_path / "tls")
    with behind_tls(port, made, key) as outside:
        yield outside, made


def test_user_password_and_an_authority_of_ones_own_fit_into_the_address(
    folders: Folders, admin: Redis, secured: tuple[int, Path]
) -> None:
    admin.execute_command("ACL", "SETUSER", "dllm", *rules())
    port, made = secured
    live(folders, f"rediss://dllm:{SECRET}@localhost:{port}/0?ssl_ca_certs={made}")


def test_an_untrusted_certificate_is_one_line_with_the_remedy(folders: Folders, secured: tuple[int, Path]) -> None:
    port, made = secured
    message = refusal(folders, f"rediss://:{SECRET}@localhost:{port}/0")
    assert "not trusted (self-signed certificate)" in message
    assert "ssl_ca_certs" in message
    message = refusal(folders, f"rediss://:{SECRET}@127.0.0.1:{port}/0?ssl_ca_certs={made}")
    assert "127.0.0.1" in message
    assert "the host as the certificate does" in message


def test_an_address_without_tls_for_a_server_with_it(folders: Folders, secured: tuple[int, Path]) -> None:
    assert "write rediss://" in refusal(folders, f"redis://:{SECRET}@localhost:{secured[0]}/0")


# Secrets


def test_a_password_is_in_no_output_and_no_log(folders: Folders, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_ROOT", str(folders.root))
    monkeypatch.setenv("DLLM_LOG_LEVEL", "debug")
    unreachable = free_port()
    for url in (
        f"redis://:{SECRET}@127.0.0.1:{port}/0",
        f"redis://:{SECRET}wrong@127.0.0.1:{port}/0",
        f"redis://:{SECRET}@127.0.0.1:{unreachable}/0",
        f"sentinel://:{SECRET}@127.0.0.1:{unreachable}/main?sentinel_password={SECRET}",
        f"redis://:{SECRET}@host:port/0",
    ):
        monkeypatch.setenv("DLLM_REDIS_URL", url)
        for command in (["status", "--json"], ["doctor"], ["stop-server"]):
            result = CliRunner().invoke(app, command)
            assert SECRET not in result.output
        assert SECRET not in repr(ProducerSettings())
    assert all(SECRET not in log.read_text() for log in folders.logs.iterdir())


@pytest.mark.parametrize("text", [f"redis_url: [{SECRET}]", f"redis_url: 'redis://:{SECRET}@host", f"a: b: {SECRET}"])
def test_a_password_in_a_file_that_cannot_be_read_is_not_told(folders: Folders, text: str) -> None:
    folders.configs.mkdir()
    (folders.configs / "producer.yaml").write_text(text)
    result = CliRunner().invoke(app, ["status", "--root", str(folders.root)])
    assert result.exit_code == 2
    assert "producer.yaml" in result.output
    assert SECRET not in result.output


# Sentinels


def test_a_fail_over_is_followed(folders: Folders, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    """What the replica had is there, and work goes on with it."""
    primary, replica, watching = free_port(), free_port(), free_port()
    login = ["--requirepass", SECRET, "--masterauth", SECRET]
    following = [*login, "--replicaof", "127.0.0.1", str(primary), "--repl-diskless-sync-delay", "0"]
    url = f"sentinel://:{SECRET}@127.0.0.1:{free_port()},127.0.0.1:{watching}/main/0?sentinel_password=guard"
    settings = ProducerSettings(root=folders.root, redis_url=url)
    with (
        running(tmp_path / "a", primary, *login, "--repl-diskless-sync-delay", "0") as first,
        running(tmp_path / "b", replica, *following),
        sentinel(tmp_path / "s", watching, primary, "main", SECRET, "guard"),
    ):
        redis = server.open_redis(settings)
        assert redis.info("server")["tcp_port"] == primary == asyncio.run(port_in_a_loop(url))
        ledger = Ledger(redis)
        file = folders.root / "three.txt"
        file.write_text("a\nb\nc\n")
        spec = Claims(settings, ledger).snapshot(file)
        assert submit(spec, ledger, settings)
        assert redis.wait(1, 10_000) == 1

        first.kill()
        wait_until(lambda: answered(lambda: redis.set("dllm:written", 1)))
        assert redis.info("server")["tcp_port"] == replica == asyncio.run(port_in_a_loop(url))
        work(WorkerSettings(root=folders.root, redis_url=url, name="w", linger_ms=0), ledger)
        batch = ledger.get(spec.batch)
        assert batch is not None
        assert (batch.state, batch.counts.done) == (BatchState.DONE, 3)


async def port_in_a_loop(url: str) -> int:
    """The port of the server that an event loop's connection is led to."""
    async with addresses.async_client(url) as redis:
        return int((await redis.info("server"))["tcp_port"])


def answered(ask: Callable[[], Any]) -> bool:
    try:
        return bool(ask())
    except RedisError:
        return False


def test_sentinels_that_know_no_primary_are_one_line_with_the_remedy(folders: Folders, tmp_path: Path) -> None:
    primary, replica, watching = free_port(), free_port(), free_port()
    with (
        running(tmp_path / "a", primary, "--requirepass", SECRET, "--repl-diskless-sync-delay", "0"),
        running(tmp_path / "b", replica, "--masterauth", SECRET, "--replicaof", "127.0.0.1", str(primary)),
        sentinel(tmp_path / "s", watching, primary, "main", SECRET, "guard"),
    ):
        place = f"sentinel://:{SECRET}@127.0.0.1:{watching}"
        assert "know no living primary of 'other'" in refusal(folders, f"{place}/other/0?sentinel_password=guard")
        assert "correct sentinel_username and sentinel_password" in refusal(folders, f"{place}/main/0")
