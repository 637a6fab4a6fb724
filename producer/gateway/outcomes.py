"""A batch as OpenAI's clients know it, and the files that came of it. All of it follows from the ledger and the disk.

A batch's id and those of its output and error file are made of its own name here, so that nothing has to be remembered.
Every call here may wait for Redis or the disk: it belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from contract import stores
from contract.ledger import Batch, BatchState, Ledger
from contract.paths import Folders
from producer.gateway.filestore import Stored

BATCH = "batch_"
ENDS: dict[str, Literal[".openai.jsonl", ".openai.errors.jsonl"]] = {
    "file-output-": ".openai.jsonl",
    "file-errors-": ".openai.errors.jsonl",
}
PURPOSE = "batch_output"
PIECE = 1 << 20
WINDOW = "24h"
WINDOW_S = 86_400


def find(batch_id: str, owner: str, ledger: Ledger) -> Batch | None:
    """None for a batch that is not there, or is another's."""
    record = ledger.get(batch_id.removeprefix(BATCH)) if batch_id.startswith(BATCH) else None
    return record if record and record.spec.served and record.spec.served.owner == owner else None


def document(record: Batch, folders: Folders) -> dict[str, Any]:
    """The batch object."""
    spec, counts = record.spec, record.counts
    served = spec.served
    assert served is not None
    state, ended, finished = status(record), _whole(record.ended_at), _whole(record.finished_at)
    files = {start: stored.id for start, stored in _files(record, folders).items()}
    return {
        "id": f"{BATCH}{spec.batch}",
        "object": "batch",
        "endpoint": served.endpoint,
        "model": spec.model,
        "errors": None,
        "input_file_id": served.input_file,
        "completion_window": WINDOW,
        "status": state,
        "output_file_id": files.get("file-output-"),
        "error_file_id": files.get("file-errors-"),
        "created_at": int(spec.created_at),
        "in_progress_at": _whole(record.started_at),
        "expires_at": int(spec.created_at) + WINDOW_S,
        "finalizing_at": ended if state in ("finalizing", "completed") else None,
        "completed_at": finished if state == "completed" else None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": _whole(record.cancelled_at),
        "cancelled_at": finished if state == "cancelled" else None,
        "request_counts": {
            "total": counts.submitted if counts.total is None else counts.total,
            "completed": counts.done,
            "failed": counts.failed + counts.cancelled,
        },
        "metadata": served.metadata or None,
    }


def status(record: Batch) -> str:
    """In OpenAI's words."""
    if record.state is BatchState.DONE:
        return "completed" if record.cancelled_at is None else "cancelled"
    if record.cancelled_at is not None:
        return "cancelling"
    if record.counts.complete:
        return "finalizing"
    return "in_progress" if record.counts.submitted else "validating"


def file(file_id: str, owner: str, ledger: Ledger, folders: Folders) -> Stored | None:
    """An output or error file by its id."""
    for start in ENDS:
        if file_id.startswith(start):
            record = find(f"{BATCH}{file_id.removeprefix(start)}", owner, ledger)
            return _files(record, folders).get(start) if record else None
    return None


def read(stored: Stored, folders: Folders) -> Iterator[bytes]:
    """The content of such a file, a piece at a time. Raises FileNotFoundError at once."""
    stream = stores.of(folders).open(str(stored.place))

    def pieces() -> Iterator[bytes]:
        with stream:
            yield from iter(lambda: stream.read(PIECE), b"")

    return pieces()


def remove(stored: Stored, folders: Folders) -> None:
    stores.of(folders).delete(str(stored.place))


def newest_first(owner: str, ledger: Ledger, folders: Folders) -> Iterator[Stored]:
    """The files that came of all batches of `owner`, by when the batches were made."""
    for record in ledger.newest_first(owner):
        yield from _files(record, folders).values()


def _files(record: Batch, folders: Folders) -> dict[str, Stored]:
    """Those that are there, by how their ids begin. Empty ones are none, as with OpenAI."""
    if record.state is not BatchState.DONE or record.spec.served is None:
        return {}
    found, store = {}, stores.of(folders, record.spec)
    for start, end in ENDS.items():
        name = Path(f"{record.spec.output}{end}")
        if size := store.size(str(name)):
            found[start] = Stored(
                id=f"{start}{record.spec.batch}",
                owner=record.spec.served.owner,
                filename=name.name,
                purpose=PURPOSE,
                bytes=size,
                created_at=record.finished_at or record.spec.created_at,
                place=name,
            )
    return found


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
