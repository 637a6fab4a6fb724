"""`serve`, `dashboard` and `key`: the HTTP service and the page run, and those who may ask them have keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from contract.errors import UsageError
from contract.flags import Model, RedisUrl, Root
from contract.settings import ProducerSettings, read
from producer import display, listening
from producer.commands.options import Debug, Json
from producer.commands.session import Session, Stop, errors
from producer.gateway import keys


def serve(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port, 0 for any that is free [8000]")] = None,
    model: Model = None,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Answer HTTP requests through OpenAI's interface until told to stop.

    Example: producer serve --port 8000
    """
    with errors(debug), Stop():
        listening.require()
        flags = {"root": root, "redis_url": redis_url, "model": model, "serve_host": host, "serve_port": port}
        session = Session.open(flags, quiet=False)
        listening.serve(session.settings, session.ledger)


def dashboard(
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port, 0 for any that is free [8080]")] = None,
    allow_actions: Annotated[
        bool | None, typer.Option("--allow-actions", help="Failed rows can be queued again from the page")
    ] = None,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Show batches, workers, throughput and failures as a page for a browser until told to stop.

    Example: producer dashboard --port 8080
    """
    with errors(debug), Stop():
        listening.require()
        flags = {"root": root, "redis_url": redis_url, "dashboard_host": host, "dashboard_port": port}
        session = Session.open({**flags, "dashboard_actions": allow_actions}, quiet=False)
        listening.show(session.settings, session.ledger)


def key(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Whose key; without it all are listed")] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=0, help="A limit of its own; 0 for none")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option("--concurrent", min=0, help="Requests at a time, of its own; 0 for any number")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="NAME's other keys end")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="NAME's keys end, and there is no new one")] = False,
    as_json: Json = False,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Make an API key for `producer serve` and `producer dashboard`, shown this once; what runs takes it at once.

    Example: producer key alice --requests-per-minute 60
    """
    with errors(debug):
        file = keys.place(read(ProducerSettings, {"root": root}))
        if name is None:
            _list(file, as_json)
        elif revoke:
            ended = keys.revoke(file, name)
            if not ended:
                raise UsageError(f"nobody called '{name}' has a key: `producer key` lists those who have")
            display.answer(json.dumps({"name": name, "revoked": ended}) if as_json else f"{name}: {ended} revoked")
        else:
            made = keys.make(file, name, requests_per_minute, concurrent, replace)
            display.answer(json.dumps({"name": name, "key": made}) if as_json else made)


def _list(file: Path, as_json: bool) -> None:
    known = keys.read(file).keys
    if as_json:
        told = [one.model_dump(mode="json", exclude={"hash"}, exclude_none=True) for one in known]
        display.answer(json.dumps({"keys": told}, indent=2))
        return
    limits = [tuple("-" if one is None else one for one in (key.requests_per_minute, key.concurrent)) for key in known]
    rows = [(key.name, display.moment(key.created_at), *own) for key, own in zip(known, limits, strict=True)]
    display.table(("name", "made", "requests/min", "at a time"), rows)
