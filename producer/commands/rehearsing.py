"""`producer submit --dry-run`: what files would come to."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from contract import formats
from contract.settings import ProducerSettings
from producer import display, preview, sources
from producer.claims import columns, planned
from producer.commands.session import INTERRUPTED, Stop
from producer.sources import STDIN


def rehearse(files: Iterable[Path], piped: str, as_json: bool, settings: ProducerSettings, stop: Stop) -> None:
    """Tell what each file would come to. Exits 1 if any row could not run."""
    formats.require(settings.output_format)
    found = []
    for file in files:
        with _spooled(piped, stop) if file == STDIN else contextlib.nullcontext(file) as readable:
            spec = planned(readable, settings, columns(settings), source=piped if file == STDIN else None)
            found.append(preview.preview(readable, spec, settings, stop))
        if not as_json:
            display.preview(found[-1])
    if stop():
        raise typer.Exit(INTERRUPTED)
    last = preview.last_throughput(settings.folders.logs, settings.queue_model)
    if as_json:
        display.answer(json.dumps(preview.document(found, last), indent=2))
    else:
        display.estimate(found, last, settings.queue_model)
    if any(one.errors for one in found):
        raise typer.Exit(1)


@contextlib.contextmanager
def _spooled(piped: str, stop: Stop) -> Iterator[Path]:
    """Standard input as a file that is gone afterwards."""
    with tempfile.NamedTemporaryFile(suffix=piped[piped.index(".") :]) as spool:
        spool.writelines(sources.stdin(stop))
        spool.flush()
        yield Path(spool.name)
