"""Who asks: a dependency of every address that is not for everybody.

Without any key there is one nameless caller, and the service listens on loopback only (`producer.listening`).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from producer.gateway.errors import ApiError
from producer.gateway.limits import Caller
from producer.gateway.loopback import is_loopback
from producer.gateway.service import Here

NOBODY = "-"
"""The name of who asks a service without keys."""
bearer = HTTPBearer(auto_error=False, description="An API key, as `producer key NAME` makes one")


async def caller(
    request: Request, here: Here, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
) -> Caller:
    """Raises ApiError (401) without a key that is known."""
    settings, keys = here.settings, here.keys
    rate, concurrent = settings.serve_requests_per_minute, settings.serve_concurrent
    if not here.needs_key:
        _refuse_other_names(request.url.hostname or "")
        found = Caller(NOBODY, rate, concurrent)
    elif key := keys.find(given.credentials) if given else None:
        found = Caller(
            key.name,
            rate if key.requests_per_minute is None else key.requests_per_minute,
            concurrent if key.concurrent is None else key.concurrent,
        )
    else:
        raise ApiError(401, _missing(given), code="invalid_api_key")
    request.state.entry.caller = found.name
    return found


Asking = Annotated[Caller, Depends(caller)]


def _refuse_other_names(host: str) -> None:
    """A page of another site can have its own name lead to this machine, and then ask in its reader's browser."""
    if not is_loopback(host):
        what = f"this service has no API keys, and answers as localhost only, not as '{host[:100]}'"
        raise ApiError(421, f"{what}: make a key with `producer key NAME`", code="wrong_host")


def _missing(given: HTTPAuthorizationCredentials | None) -> str:
    if given is None:
        return "an API key is needed: send the header 'Authorization: Bearer KEY'"
    return "this API key is not known, or was revoked"
