"""Options that several commands of `producer` take, and what a shell completes in them."""

from __future__ import annotations

from typing import Annotated

import typer

from contract.errors import UsageError, nearest
from contract.jobs import ErrorCode
from producer.commands import completing

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else")]
BatchId = Annotated[
    str,
    typer.Argument(
        metavar="BATCH", help="Batch id, as `submit` and `status` print it", autocompletion=completing.batches
    ),
]
MaybeBatch = Annotated[
    str | None,
    typer.Argument(metavar="[BATCH]", help="Batch id, as `status` prints it", autocompletion=completing.batches),
]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only the row with this id; may be repeated")]
Codes = Annotated[
    list[str] | None,
    typer.Option("--code", help="Only rows with this error code; may be repeated", autocompletion=completing.codes),
]


def error_codes(given: list[str] | None) -> set[ErrorCode] | None:
    """The error codes that were given; None for all. Raises UsageError naming the nearest known one."""
    for code in given or ():
        if code not in set(ErrorCode):
            raise UsageError(f"no error code '{code}'{nearest(code, list(ErrorCode))}: one of {', '.join(ErrorCode)}")
    return {ErrorCode(code) for code in given} if given else None
