"""What a shell completes: batches that there are, error codes. Quick, and silent whatever is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from contract import server
from contract.jobs import REMEDIES
from contract.ledger import Ledger
from contract.settings import ProducerSettings, read
from producer import display

SHOWN = 100


def batches(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """The newest batches, each with its file and how it stands. None where no server is up, or it is slow."""
    flags = {name: context.params.get(name) for name in ("root", "redis_url")}
    with contextlib.suppress(Exception):  # a prompt that is being written is no place for complaints
        redis = server.glance(read(ProducerSettings, flags))
        for batch in Ledger(redis).newest(SHOWN) if redis is not None else ():
            if batch.spec.batch.startswith(incomplete):
                total = "?" if batch.counts.total is None else batch.counts.total
                yield (
                    batch.spec.batch,
                    f"{display.safe(batch.spec.source)}, {batch.state}, {batch.counts.ended} of {total}",
                )


def codes(incomplete: str) -> list[tuple[str, str]]:
    """Error codes, each with what is to be done about it."""
    return [(code, remedy) for code, remedy in REMEDIES.items() if code.startswith(incomplete)]
