"""Before the first word to a server: what `redis_url` may say, and what is said when it leads nowhere.

    redis://[USER:PASSWORD@]HOST:PORT/DB       rediss:// for TLS, with ?ssl_ca_certs=/PATH for an authority of your own
    unix:///PATH?db=DB
    sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/SERVICE/DB
        asks the Sentinels at these places for the primary of SERVICE, again at each new connection; user and password
        are the server's, ?sentinel_username= and ?sentinel_password= the Sentinels'; sentinels:// for TLS to all

An address may hold a password, so only `shown` may be told to anybody.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from contract.names import Connection

SCHEMES = ("redis", "rediss", "unix", "sentinel", "sentinels")
FORMS = (
    "redis://HOST:PORT/DB, rediss://HOST:PORT/DB, unix:///PATH or sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
    "with USER:PASSWORD@ before the host where they are needed"
)
SENTINEL_PORT = 26379
SENTINEL_ANSWER_S = 2.0
"""A Sentinel that takes longer is passed over for the next one."""


def client(url: str, **options: Any) -> Connection:
    """A connection to the server at `url`. Raises ValueError, which may hold the address, when that is none."""
    if urlsplit(url).scheme in ("sentinel", "sentinels"):
        return _through_sentinels(url, options)
    return cast(Connection, Connection.from_url(url, **options))


class Patience(Retry):
    """Repeats what an outage may have broken; a password or certificate that is wrong stays so."""

    def call_with_retry(self, do: Any, fail: Any, is_retryable: Any = None, **options: Any) -> Any:  # type: ignore[override]
        def passes(error: Exception) -> bool:
            lasting = isinstance(error, AuthenticationError) or any(
                isinstance(one, ssl.SSLError) for one in _causes(error)
            )
            return not lasting and (is_retryable is None or is_retryable(error))

        return super().call_with_retry(do, fail, is_retryable=passes, **options)


def _through_sentinels(url: str, options: dict[str, Any]) -> Connection:
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or (db and not db.isdecimal()):
        raise ValueError("a Sentinel address ends with /SERVICE/DB")
    tls = parts.scheme == "sentinels"
    given = parse_url(f"{'rediss' if tls else 'redis'}://{user}@localhost/{db}?{parts.query}")  # type: ignore[no-untyped-call]
    for name in ("host", "connection_class"):
        given.pop(name, None)
    login = {name: given.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    secured = {"ssl": True, **{name: value for name, value in given.items() if name.startswith("ssl_")}} if tls else {}
    patience = {"socket_timeout": SENTINEL_ANSWER_S, "socket_connect_timeout": SENTINEL_ANSWER_S}
    once = {"retry": Retry(NoBackoff(), retries=0)}  # whoever asks in vain asks all of them again
    asking = login | secured | patience | once
    sentinels = _Sentinels([_place(host) for host in hosts.split(",")], sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    wanted = {"redis_class": Connection, **options, **given, **secured}
    return cast(Connection, sentinels.master_for(unquote(service), **wanted))  # type: ignore[no-untyped-call]


class _Sentinels(Sentinel):
    """Those that are asked; where they know no primary, the error names no connection with its secrets."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return cast("tuple[str, int]", super().discover_master(service_name))  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            refused = "AuthenticationError" in str(error)
            remedy = "they refuse us: correct sentinel_username and sentinel_password"
            why = remedy if refused else "as far as they answer"
            raise MasterNotFoundError(f"the Sentinels know no living primary of '{service_name}' ({why})") from None


def _place(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a Sentinel address names at least one host, and none between two commas")
    return parts.hostname, parts.port or SENTINEL_PORT


def shown(url: str) -> str:
    """`url` without user, password and options. A password with a `/` in it does not end where one would think."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        return "(no address)"
    place = rest.partition("?")[0].rpartition("@")[2]
    hidden = "@" in rest.partition("?")[2]
    return f"{scheme}://…" if hidden else f"{scheme}://{place}"


def trouble(url: str, error: RedisError) -> str:
    """One line for an error of the first words to the server: what is wrong, and what to do about it."""
    place, text = shown(url), " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        return f"the Redis server at {place} refuses us ({text}): correct user and password in redis_url"
    if isinstance(error, NoPermissionError):
        return (
            f"the Redis user of redis_url lacks a permission ({text}): give it the rules that docs/operations.md "
            "names under 'Redis on a network'"
        )
    if isinstance(error, MasterNotFoundError):
        return f"{text} at {place}: correct hosts and service in redis_url, or wait until the fail-over is through"
    if isinstance(error, RedisTimeoutError):
        why = "no answer in time"
    elif reason := _tls_trouble(place, error):
        return reason
    elif re.search(r"closed by server|reset by peer", text):
        why = "it closes the connection: where it wants TLS, write rediss://"
    else:
        why = "no connection"
    return (
        f"Redis is not reachable at {place} ({why}): start it, correct redis_url, "
        "or remove redis_url to use a local server"
    )


def _tls_trouble(place: str, error: BaseException) -> str | None:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"the certificate of the Redis server at {place} is not trusted ({cause.verify_message}): "
                "name its authority in redis_url, ?ssl_ca_certs=/PATH/ca.pem, and the host as the certificate does"
            )
        if isinstance(cause, ssl.SSLError):
            return (
                f"no TLS with the Redis server at {place} ({cause.reason}): write redis:// where it has none, and "
                "name ?ssl_certfile=/PATH&ssl_keyfile=/PATH where it wants to know who we are"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
