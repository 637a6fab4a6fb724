"""Before anything is measured: is there such a server, which models does it list, and which requests does it take?

Every way in which that fails is one line that says what to do. What is learnt here (the model, the server's dialect)
goes into the target; the calls made here are not measured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import httpx2

from contract.errors import EndpointError, UsageError, nearest
from producer.endpoint.client import CallError, Dialect, Failure, Kind, Target, call, read, reason, refusal
from producer.endpoint.load import pause_after
from producer.endpoint.prompts import Prompt

LIST_S = 10.0
TRIES = 3
"""Of the first call, where the server is busy or fails: an endpoint that fails now and then can be measured."""
MODELS_SHOWN = 20
TRANSIENT = (Kind.RATE_LIMITED, Kind.SERVER_ERROR, Kind.LOST)


@dataclass(frozen=True)
class Opened:
    """An endpoint that has answered once: whom to measure, what the server calls itself, and what is worth knowing."""

    target: Target
    server: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """What `/models` told: models' ids (None: it tells of none), and the server's header."""

    models: tuple[str, ...] | None
    server: str | None


async def open_endpoint(http: httpx2.AsyncClient, target: Target, prompt: Prompt) -> Opened:
    """Find the model and the dialect. Raises UsageError (key, model, address), EndpointError (no server, no answer)."""
    listing = await _list_models(http, target)
    target = replace(target, model=target.model or _only(listing.models))
    target, notes = await _settle(http, target, prompt, listing)
    if listing.models is not None and target.model not in listing.models:
        notes.append(f"the server does not list the model '{target.model}', but answers for it")
    return Opened(target, listing.server, tuple(notes))


async def _list_models(http: httpx2.AsyncClient, target: Target) -> Listing:
    try:
        async with asyncio.timeout(LIST_S), http.stream("GET", f"{target.base_url}/models") as response:
            body = await read(response)
    except (TimeoutError, httpx2.ConnectTimeout):
        raise EndpointError(f"{target.base_url} does not answer within {LIST_S:g} s: is the address right?") from None
    except (httpx2.HTTPError, CallError) as error:
        raise EndpointError(f"cannot reach {target.base_url}: {reason(error)}; is a server running there?") from None
    if response.status_code != 200:
        failure = refusal(response, body).failure
        if failure.kind is Kind.UNAUTHORIZED:
            _refuse_key(failure)
        if response.status_code == 404:
            await _hint_at_v1(http, target)
        return Listing(None, response.headers.get("server"))  # not every server lists; the first call decides
    try:
        return Listing(_ids(json.loads(body)), response.headers.get("server"))
    except (ValueError, RecursionError):
        kind = response.headers.get("content-type", "no content type")
        raise EndpointError(
            f"{target.base_url}/models answers with {kind}, not with JSON: this is no OpenAI-compatible API"
        ) from None


async def _hint_at_v1(http: httpx2.AsyncClient, target: Target) -> None:
    """The most usual mistake in an address."""
    if target.base_url.endswith("/v1"):
        return
    try:
        async with asyncio.timeout(LIST_S):
            found = (await http.get(f"{target.base_url}/v1/models")).status_code in (200, 401, 403)
    except (TimeoutError, httpx2.HTTPError):
        return
    if found:
        raise UsageError(f"{target.base_url} has no /models, but {target.base_url}/v1 has: use that as --base-url")


def _ids(document: Any) -> tuple[str, ...] | None:
    rows = document.get("data") if isinstance(document, Mapping) else None
    if not isinstance(rows, list):
        return None
    return tuple(str(row["id"]) for row in rows if isinstance(row, Mapping) and "id" in row)


def _only(models: Sequence[str] | None) -> str:
    """The model of a server that has one."""
    if models and len(models) == 1:
        return models[0]
    if not models:
        raise UsageError("the server lists no models: name one with --model")
    raise UsageError(f"name a model with --model: the server lists {_shown(models)}")


async def _settle(
    http: httpx2.AsyncClient, target: Target, prompt: Prompt, listing: Listing
) -> tuple[Target, list[str]]:
    """The target in a dialect that the server takes, and notes on what it does not take."""
    notes: list[str] = []
    tried, refused = target, None
    while True:
        failure = await _first_call(http, tried, prompt)
        if failure is None:
            return tried, notes
        dialect = tried.dialect.after(failure.message) if failure.status in (400, 422) else None
        if dialect is None:
            _refuse(refused or failure, target, listing)
        refused = refused or failure
        notes.append(_changed(tried.dialect, dialect))
        tried = replace(tried, dialect=dialect)


async def _first_call(http: httpx2.AsyncClient, target: Target, prompt: Prompt) -> Failure | None:
    for left in reversed(range(TRIES)):
        done = await call(http, target, prompt)
        if done.failure is None or done.failure.kind not in TRANSIENT or not left:
            break
        await asyncio.sleep(pause_after(done))
    return done.failure


def _changed(before: Dialect, after: Dialect) -> str:
    if after.limit != before.limit:
        return f"the server wants '{after.limit}' in place of '{before.limit}'"
    return "the server refuses stream_options.include_usage: usage was not asked for"


def _refuse(failure: Failure, target: Target, listing: Listing) -> NoReturn:
    """Why the first call failed, and what to do."""
    said = f" ({failure.status}: {failure.message})" if failure.status else f" ({failure.message})"
    unknown = listing.models is not None and target.model not in listing.models
    if failure.kind is Kind.UNAUTHORIZED:
        _refuse_key(failure)
    if unknown and failure.kind in (Kind.NOT_FOUND, Kind.BAD_REQUEST):
        models = listing.models or ()
        raise UsageError(
            f"no model '{target.model}'{nearest(target.model, models)}: the server lists {_shown(models) or 'none'}"
        )
    if failure.kind is Kind.NOT_FOUND and listing.models is None:
        raise EndpointError(f"{target.base_url} has neither models nor {target.api}{said}: is that the address?")
    if failure.kind is Kind.NOT_FOUND:
        raise UsageError(f"no {target.api} for the model '{target.model}'{said}: try the other --api")
    if failure.kind is Kind.BAD_REQUEST:
        raise UsageError(f"the server refuses the request{said}")
    raise EndpointError(f"the first call failed: {REMEDIES[failure.kind]}{said}")


REMEDIES = {
    Kind.REFUSED: "no connection: is the server still running?",
    Kind.LOST: "the server closed the connection: read its log",
    Kind.TIMEOUT: "raise --timeout-s, or lower --max-tokens",
    Kind.RATE_LIMITED: "the server is busy or limits this key: try again later",
    Kind.SERVER_ERROR: "the server failed: read its log",
    Kind.BROKEN_STREAM: "the stream broke: try --no-stream, and read the server's log",
    Kind.BAD_ANSWER: "this is no OpenAI-compatible answer: is the address right?",
}


def _refuse_key(failure: Failure) -> NoReturn:
    raise UsageError(
        f"the server refuses the API key ({failure.status}: {failure.message}): "
        "give one with DLLM_API_KEY, OPENAI_API_KEY or --api-key"
    )


def _shown(models: Sequence[str]) -> str:
    more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
    return ", ".join(models[:MODELS_SHOWN]) + more
