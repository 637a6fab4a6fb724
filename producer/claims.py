"""Taking a source file for a batch: `.claimed/{batch}/` holds the file and `batch.json`, what was asked for.

First act of a prompt's life. The order makes every instant safe: name reserved, manifest written, file renamed into
the folder, batch recorded in the ledger. Whoever finds a folder in which the last steps are missing does them, also
when Redis has lost everything. Knows no lines and no prompts; never overwrites or deletes a source.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
import unicodedata
from pathlib import Path
from typing import Literal, NamedTuple, cast

from pydantic import ValidationError

from contract import audit, claimed, logs
from contract.claimed import MANIFEST, idle_s
from contract.errors import DllmError, UsageError
from contract.hours import Hours
from contract.ledger import Batch, BatchSpec, BatchState, Ledger, Prices
from contract.paths import Folders, publish
from contract.settings import ProducerSettings
from producer.notices import Notices

PARTIAL = ".copy.part"
KINDS: dict[str, Literal["txt", "jsonl"]] = {".txt": "txt", ".jsonl": "jsonl"}
LONGEST_SLUG = 40
LONGEST_OUTPUT = 200
ABANDONED_S = 60.0
NOT_CONTENT = {"batch", "source", "output", "priority", "created_at", "hours", "prices", "content"}
"""What may differ between two batches that publish the same: the names, when they run, and what that costs."""
ID_BYTES = 6
"""Random part of a batch's id, which must differ from those of all installations on the server."""


class Look(NamedTuple):
    """What a file looked like at one moment; two equal looks some time apart mean that nobody is writing it."""

    size: int
    mtime_ns: int
    inode: int
    mode: int

    @staticmethod
    def at(file: Path) -> Look:
        """Does not follow links."""
        found = os.lstat(file)
        return Look(found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode)

    @property
    def regular(self) -> bool:
        return stat.S_ISREG(self.mode)


class Claims:
    """The folder of claimed sources, and the ledger's view of it. `via` is who asks, for the audit log."""

    def __init__(self, settings: ProducerSettings, ledger: Ledger, via: str = audit.COMMAND) -> None:
        self.via = via
        self.settings = settings
        self.folders: Folders = settings.folders
        self.ledger = ledger
        self._notices = Notices()

    def source(self, spec: BatchSpec) -> Path:
        """Where the source of a batch lies while the batch runs."""
        return claimed.source(spec, self.folders)

    def take(self, file: Path, look: Look, name: str | None = None) -> BatchSpec | None:
        """Move a dropped file into a new batch; None when somebody else took it or `look` is not true any more."""
        spec = self._plan(file, name)
        try:
            claimed.write_manifest(spec, self.folders)
            if Look.at(file) != look:
                self._discard(spec)
                return None
            os.rename(file, self.source(spec))
        except FileNotFoundError:
            self._discard(spec)
            return None
        except OSError:
            self._discard(spec)
            raise
        claimed.record(spec, self.ledger, self.folders, self.via)
        return spec

    def snapshot(self, file: Path, name: str | None = None) -> BatchSpec:
        """Copy the user's own file into a new batch: what happens to the file afterwards does not matter.

        Raises DllmError when the file changes while it is copied.
        """
        return self._keep(self._copy(file, self._plan(file, name)))

    def snapshot_once(self, file: Path, name: str | None = None) -> tuple[BatchSpec, bool]:
        """As `snapshot`, but the batch that was submitted with the same content before, where there is one.

        Also whether it is a new one. Of two who do this at once, one makes the batch.
        """
        spec = self._copy(file, self._plan(file, name))
        with self.ledger.first_with(str(spec.content)):
            if other := self.ledger.with_content(str(spec.content)):
                self._discard(spec)
                return other.spec, False
            return self._keep(spec), True

    def again(self, file: Path, spec: BatchSpec, name: str | None = None) -> BatchSpec:
        """A new batch that reads `file` as the batch of `spec` read it, with `spec`'s model and parameters."""
        batch = f"{slug(name or Path(spec.source).stem)}-{secrets.token_hex(ID_BYTES)}"
        stem = output_stem(name or spec.output)
        changes = {
            "batch": batch,
            "output": claimed.reserve_output(stem, batch, self.ledger, self.folders),
            "created_at": time.time(),
            "hours": None,
        }
        return self._keep(self._copy(file, spec.model_copy(update=changes)))

    def _copy(self, file: Path, spec: BatchSpec) -> BatchSpec:
        """A copy of the file in the batch's folder, not yet under its name; the spec with its content."""
        partial = self.source(spec).with_name(PARTIAL)
        before = os.stat(file)
        try:
            claimed.write_manifest(spec, self.folders)
            shutil.copyfile(file, partial)
            after = os.stat(file)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise DllmError(f"{file} is being written: submit it when it is complete")
            spec = spec.model_copy(update={"content": content(partial, spec)})
            claimed.write_manifest(spec, self.folders)
            return spec
        except BaseException:
            self._discard(spec)
            raise

    def _keep(self, spec: BatchSpec) -> BatchSpec:
        """The copy gets its name, and the ledger learns of the batch."""
        target = self.source(spec)
        try:
            publish(target.with_name(PARTIAL), target)
        except BaseException:
            self._discard(spec)
            raise
        claimed.record(spec, self.ledger, self.folders, self.via)
        return spec

    def pending(self) -> list[BatchSpec]:
        """Claimed batches that are not submitted to their end, the oldest first.

        Finishes what a crash interrupted on the way: records batches that the ledger does not know, and sweeps
        folders that never got their source.
        """
        found = [spec for folder in claimed.entries(self.folders) if (spec := self._read_manifest(folder)) is not None]
        known = {batch.spec.batch: batch for batch in self.ledger.get_many([spec.batch for spec in found])}
        open_ones = [self._settle(spec, known.get(spec.batch)) for spec in found]
        return sorted((spec for spec in open_ones if spec), key=lambda spec: spec.created_at)

    def _settle(self, spec: BatchSpec, batch: Batch | None) -> BatchSpec | None:
        """`spec` when it has rows to submit."""
        if not self.source(spec).exists():
            self._without_source(spec, batch)
            return None
        if batch is None:
            return claimed.adopt(spec, self.ledger, self.folders)
        return spec if batch.state is BatchState.SUBMITTING else None

    def _without_source(self, spec: BatchSpec, batch: Batch | None) -> None:
        """The claim is on its way, or was published, or died before it began; or a source was taken from under us."""
        if batch is not None and batch.state is BatchState.SUBMITTING:
            place = str(self.source(spec))
            self._notices.warn(spec.batch, "source_missing", batch=spec.batch, file=place)
        elif (batch is None or batch.state is BatchState.DONE) and idle_s(self.source(spec).parent) > ABANDONED_S:
            self._discard(spec, keep_name=batch is not None)

    def _plan(self, file: Path, name: str | None) -> BatchSpec:
        stem = name or file.stem
        batch = f"{slug(stem)}-{secrets.token_hex(ID_BYTES)}"
        now = time.time()
        return BatchSpec(
            batch=batch,
            source=file.name,
            output=claimed.reserve_output(output_stem(stem), batch, self.ledger, self.folders),
            kind=KINDS[file.suffix.lower()],
            txt_mode=self.settings.txt_mode,
            model=self.settings.queue_model,
            priority=self.settings.priority,
            params=self.settings.params,
            created_at=now,
            hours=Hours.of(self.settings.not_before, self.settings.window, now),
            output_format=self.settings.output_format,
            prices=_prices(self.settings),
        )

    def _read_manifest(self, folder: Path) -> BatchSpec | None:
        try:
            spec = claimed.read_manifest(folder)
        except FileNotFoundError:
            if idle_s(folder) > ABANDONED_S:
                _remove(folder)
            return None
        except (OSError, ValidationError) as error:
            self._notices.warn(folder.name, "claim_unreadable", folder=str(folder), reason=str(error))
            return None
        return spec if spec.batch == folder.name else None

    def _discard(self, spec: BatchSpec, keep_name: bool = False) -> None:
        """Take back a claim that has no source."""
        _remove(self.folders.claimed / spec.batch)
        if not keep_name:
            claimed.release_output(spec, self.ledger)


def _prices(settings: ProducerSettings) -> Prices | None:
    found = Prices(
        per_hour=settings.price_per_hour,
        per_million_input=settings.price_per_million_input,
        per_million_output=settings.price_per_million_output,
    )
    return found if found != Prices() else None


def content(file: Path, spec: BatchSpec) -> str:
    """A hash of the file's bytes and of all that is asked for them that changes what is published."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(spec.model_dump_json(exclude=NOT_CONTENT).encode())
    return digest.hexdigest()


def is_utf8(name: str) -> bool:
    """Can a manifest hold this file name? Names of other encodings reach us with surrogates in them."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def checked_name(name: str) -> str:
    """`name` when it can be the stem of output files. Raises UsageError."""
    if name != output_stem(name):
        raise UsageError(f"--name {name!r} cannot be a file name here: try '{output_stem(name)}'")
    return name


def output_stem(stem: str) -> str:
    """`stem` as the stem of output files: visible, of bearable length, and never taken for another batch's files."""
    visible = re.sub(r"[\x00-\x1f\x7f/\\]", "_", stem).strip().lstrip(".")
    short = visible.encode("utf-8", "replace")[:LONGEST_OUTPUT].decode("utf-8", "ignore")
    return re.sub(r"\.(errors|openai)$", r"-\1", short, flags=re.IGNORECASE) or "batch"


def slug(stem: str) -> str:
    """`stem` in the letters that batch ids may have: A-Z, a-z, 0-9, dash and underscore."""
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_]+", "-", plain)[:LONGEST_SLUG].strip("-") or "batch"


def _remove(folder: Path) -> None:
    """Remove a claim's own files; a folder that holds anything else stays."""
    for name in (MANIFEST, f".{MANIFEST}.part", PARTIAL):
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if folder.exists():
            logs.get().warning("claim_left", folder=str(folder), reason=cast(str, error.strerror))
