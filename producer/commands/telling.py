"""`logs` and `report`: what the logs of all processes say of a prompt, and of the last hours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from contract import server
from contract.errors import ServerError, UsageError
from contract.flags import RedisUrl, Root
from contract.ledger import Ledger
from contract.settings import ProducerSettings, read
from producer import display, journals, review, story
from producer.commands.options import Debug, Json
from producer.commands.session import errors


def logs(
    subject: Annotated[str, typer.Argument(metavar="BATCH[:INDEX]", help="A batch, or one of its rows by its index")],
    since: Annotated[str | None, typer.Option("--since", help="Not before: 24h, 90m, 7d or 2026-12-02T22:00")] = None,
    as_json: Json = False,
    root: Root = None,
    redis_url: RedisUrl = None,
    debug: Debug = False,
) -> None:
    """Tell the story of a batch or of one prompt, from the logs of all processes, and how it stands now.

    Example: producer logs questions-1a2b3c4d:17
    """
    with errors(debug):
        told = story.Subject.of(subject)
        settings = read(ProducerSettings, {"root": root, "redis_url": redis_url})
        standing = _how_it_stands(told, settings)
        start = journals.since(since) if since else None
        found = story.events(told, settings.folders.logs, start)
        count = display.story(told, found, standing, as_json)
        if standing is None and not count:
            raise UsageError(f"neither Redis nor the logs know '{subject}': `producer status` lists the batches")


def _how_it_stands(told: story.Subject, settings: ProducerSettings) -> dict[str, Any] | None:
    """None where Redis is away, or knows no such batch: then the logs are asked alone."""
    try:
        ledger = Ledger(server.open_redis(settings))
        batch = ledger.get(told.batch)
        return story.standing(told, batch, ledger, settings.folders) if batch else None
    except (ServerError, RedisError) as error:
        display.say(f"how it stands is not known: {error}")
        return None


def report(
    since: Annotated[str, typer.Option("--since", help="24h, 90m, 7d or a moment such as 2026-12-02T22:00")] = "24h",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it over time: a .png, .svg or .pdf file")] = None,
    as_json: Json = False,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Sum up throughput and failures of the last hours from the logs: over time, by model, by worker, by code.

    Example: producer report --since 24h --plot yesterday.png
    """
    with errors(debug):
        settings = read(ProducerSettings, {"root": root})
        found = review.review(settings.folders.logs, journals.since(since))
        if plot is not None:
            review.plot(found, plot)
        if as_json:
            display.answer(found.model_dump_json(indent=2))
            return
        display.review(found)
