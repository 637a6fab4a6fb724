"""What may be said of an address, and which addresses are none."""

from __future__ import annotations

import ssl

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.sentinel import SentinelConnectionPool

from contract.addresses import Patience, client, shown
from contract.queues import connect


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("rediss://me:hunter2@host:6379/0?ssl_ca_certs=/ca.pem", "rediss://host:6379/0"),
        ("redis://host/0?password=hunter2", "redis://host/0"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock"),
        ("sentinel://:hunter2@a:1,b:2/main/0?sentinel_password=hunter2", "sentinel://a:1,b:2/main/0"),
        ("redis://:hunter2/hunter2@host/0", "redis://host/0"),
        ("redis://:hunter2#hunter2@host/0", "redis://host/0"),
        ("redis://:hunter2?hunter2@host/0", "redis://…"),
        ("redis://host/0?password=hunter2@", "redis://…"),
        ("hunter2", "(no address)"),
        ("http://hunter2", "(no address)"),
    ],
)
def test_no_password_is_shown(url: str, told: str) -> None:
    assert shown(url) == told


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://",
        "sentinel://a:1",
        "sentinel://a:1/",
        "sentinel:///main",
        "sentinel://a:1,,b:2/main",
        "sentinel://a:port/main",
        "sentinel://a:1/main/zero",
        "sentinel://a:1/main/0/1",
        "redis://host:port",
        "http://host",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        client(url)


def test_an_address_of_sentinels_says_who_is_asked_and_how() -> None:
    pool = connect(
        "sentinels://me:p%40ss@a,[::1]:7/the%20one/3?ssl_ca_certs=/ca.pem&sentinel_password=s"
    ).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("a", 26379), ("::1", 7)]
    assert all((one["password"], one["ssl_ca_certs"]) == ("s", "/ca.pem") for one in asked)
    assert pool.service_name == "the one"
    given = pool.connection_kwargs
    assert (given["username"], given["password"], given["db"], given["ssl_ca_certs"]) == ("me", "p@ss", 3, "/ca.pem")
    assert pool.connection_class.__name__ == "SentinelManagedSSLConnection"


def test_only_what_may_pass_is_tried_again() -> None:
    calls: list[str] = []

    def untrusted() -> None:
        calls.append("untrusted")
        try:
            raise ssl.SSLCertVerificationError("who is that?")
        except OSError as error:
            raise RedisConnectionError(str(error)) from error

    def refused() -> None:
        calls.append("refused")
        raise AuthenticationError

    def away() -> None:
        calls.append("away")
        raise RedisConnectionError

    for ask in (untrusted, refused, away):
        with pytest.raises(RedisConnectionError):
            Patience(NoBackoff(), retries=2).call_with_retry(ask, lambda error: None)
    assert calls == ["untrusted", "refused", "away", "away", "away"]
