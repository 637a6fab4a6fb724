"""What lies in `batch_inputs/.claimed/`: a folder a batch, holding its source and `batch.json`, what was asked for.

The producer claims; whoever looks later, worker or producer, can tell from a folder which batch it belongs to, and
record it in the ledger when that has lost everything or was never told.
"""

from __future__ import annotations

import itertools
import os
import time
import unicodedata
from pathlib import Path

from contract import audit, logs, stores
from contract.formats import OUTPUT_ENDS
from contract.ledger import BatchSpec, Ledger
from contract.paths import Folders, fsync_folder, publish

MANIFEST = "batch.json"


def source(spec: BatchSpec, folders: Folders) -> Path:
    """Where the source of a batch lies while the batch runs."""
    return folders.claimed / spec.batch / spec.source


def entries(folders: Folders) -> list[Path]:
    """The folders of all claims, by name."""
    return sorted(entry for entry in folders.claimed.iterdir() if entry.is_dir() and not entry.is_symlink())


def write_manifest(spec: BatchSpec, folders: Folders) -> None:
    folder = folders.claimed / spec.batch
    folder.mkdir(parents=True, exist_ok=True)
    fsync_folder(folder.parent)
    partial = folder / f".{MANIFEST}.part"
    partial.write_text(spec.model_dump_json(indent=1), encoding="utf-8")
    publish(partial, folder / MANIFEST)


def read_manifest(folder: Path) -> BatchSpec:
    """Raises OSError where there is none, ValidationError where it is damaged."""
    return BatchSpec.model_validate_json((folder / MANIFEST).read_bytes())


def record(spec: BatchSpec, ledger: Ledger, folders: Folders, via: str = audit.COMMAND) -> None:
    """The last step of a claim: the ledger learns of the batch. `via` is who asked for it, for the audit log."""
    fsync_folder(folders.claimed / spec.batch)
    audit.submitted(spec, source(spec, folders).stat().st_size, via)
    ledger.create(spec)
    logs.get(batch=spec.batch).info("batch_created", file=spec.source, output=spec.output, model=spec.model)


def adopt(spec: BatchSpec, ledger: Ledger, folders: Folders) -> BatchSpec:
    """Record a claimed batch of which the ledger knows nothing, under its old name if that is still its own."""
    if _published(spec.output, folders) or not ledger.reserve_output(spec.batch, _folded(spec.output)):
        spec = spec.model_copy(update={"output": reserve_output(spec.output, spec.batch, ledger, folders)})
        write_manifest(spec, folders)
    logs.get(batch=spec.batch).info("claim_adopted", file=spec.source)
    record(spec, ledger, folders, audit.FOUND)
    return spec


def reserve_output(stem: str, batch: str, ledger: Ledger, folders: Folders) -> str:
    """`stem`, or `stem-2`, `stem-3` …: the first that no batch owns and no file has."""
    numbered = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(
        name for name in numbered if not _published(name, folders) and ledger.reserve_output(batch, _folded(name))
    )


def release_output(spec: BatchSpec, ledger: Ledger) -> None:
    """Give the batch's output name back."""
    ledger.release_output(spec.batch, _folded(spec.output))


def forget(spec: BatchSpec, ledger: Ledger) -> bool:
    """Delete the record of a published batch, its output name with it; False when it was opened again."""
    return ledger.forget(spec.batch, _folded(spec.output), spec.content)


def idle_s(folder: Path) -> float:
    """Seconds since anything in `folder` changed; 0 while it is not there."""
    try:
        changed = [os.lstat(folder).st_mtime, *(entry.lstat().st_mtime for entry in folder.iterdir())]
    except FileNotFoundError:
        return 0.0
    return time.time() - max(changed)


def _published(name: str, folders: Folders) -> bool:
    return bool(stores.of(folders).there(f"{name}{end}" for end in OUTPUT_ENDS))


def _folded(name: str) -> str:
    """What two names have in common that are one file where case or the spelling of accents makes no difference."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
