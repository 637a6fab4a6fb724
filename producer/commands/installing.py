"""`init` and `stop-server`: a root is set up, and its server ends."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from contract import server
from contract.flags import RedisUrl, Root
from contract.settings import ProducerSettings, read
from producer import configuring, display
from producer.commands.options import Debug, Json
from producer.commands.session import errors


def init(
    force: Annotated[bool, typer.Option("--force", help="Write over the files that are there")] = False,
    as_json: Json = False,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Make the folders, and write configuration files in which every setting is explained.

    Example: producer init --root /srv/batches
    """
    with errors(debug):
        folders = read(ProducerSettings, {"root": root}).folders.create()
        written = configuring.write(folders, force)
        if as_json:
            display.answer(json.dumps({"written": [str(file) for file, new in written.items() if new]}, indent=2))
            return
        for file, new in written.items():
            display.answer(
                f"{display.near(str(file))}  {'written' if new else 'is there already: --force writes over it'}"
            )


def stop_server(as_json: Json = False, root: Root = None, redis_url: RedisUrl = None, debug: Debug = False) -> None:
    """End the local Redis server of this root; it is started again when it is needed.

    Example: producer stop-server
    """
    with errors(debug):
        stopped = server.stop(read(ProducerSettings, {"root": root, "redis_url": redis_url}))
        if as_json:
            display.answer(json.dumps({"stopped": stopped}))
        else:
            display.answer("server stopped" if stopped else "no server was running")
