"""Taking a source file for a batch: `.claimed/{batch}/` holds the file and `batch.json`, what was asked for.

First act of a prompt's life. The order makes every instant safe: name reserved, manifest written, file renamed into
the folder, batch recorded in the ledger; parameters beside the file are linked into the folder before it and unlinked
after it. Whoever finds a folder in which the last steps are missing does them, also when Redis has lost everything.
Knows no lines and no prompts; never overwrites or deletes a source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

from pydantic import ValidationError

from contract import audit, claimed, logs
from contract.claimed import MANIFEST, idle_s
from contract.columns import Columns, pieces
from contract.errors import DllmError, SettingsError, UsageError
from contract.hours import Hours
from contract.ledger import Batch, BatchSpec, BatchState, Ledger, Prices, Served
from contract.paths import Folders, publish
from contract.settings import ProducerSettings
from producer import kinds
from producer.notices import Notices

PARTIAL = ".copy.part"
SPOOL = ".stdin-"
HERE = Path()
OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069/\\]")
"""What terminals obey, what turns text around, and what separates folders: none of it is in the name of an output."""
LONGEST_SLUG = 40
LONGEST_OUTPUT = 200
ABANDONED_S = 60.0
COPIED = 1 << 20
NOT_CONTENT = {"batch", "source", "output", "priority", "created_at", "hours", "prices", "content", "served"}
"""What may differ between two batches that publish the same: the names, when they run, and what that costs."""
SPOOL_KEPT_S = 86_400.0
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
        self._columns = columns(settings)

    def source(self, spec: BatchSpec) -> Path:
        """Where the source of a batch lies while the batch runs."""
        return claimed.source(spec, self.folders)

    def take(self, file: Path, look: Look, name: str | None = None, below: Path = HERE) -> BatchSpec | None:
        """Move a dropped file into a new batch; None when somebody else took it or `look` is not true any more.

        The parameters that lie beside it come along, and are left where another file beside them needs them too.
        `below` is the folder of its outputs. Raises UsageError when the parameters are wrong; then nothing happened.
        """
        try:
            spec = self._plan(file, name, below=below)
        except FileNotFoundError:
            return None
        beside = kinds.params_beside(file)
        try:
            claimed.write_manifest(spec, self.folders)
            if Look.at(file) != look:
                self._discard(spec)
                return None
            self._copy_params(beside, spec)
            os.rename(file, self.source(spec))
            if Look.at(self.source(spec))._replace(inode=look.inode) != look:  # some file systems number anew
                self._put_back(file, spec)
                return None
        except FileNotFoundError:
            self._discard(spec)
            return None
        except OSError:
            self._discard(spec)
            raise
        if kinds.is_file(beside) and not _needed(beside):
            beside.unlink(missing_ok=True)
        claimed.record(spec, self.ledger, self.folders, self.via)
        return spec

    def _put_back(self, file: Path, spec: BatchSpec) -> None:
        """What was taken is not what was looked at: somebody wrote on, or put a link in its place. Look again later."""
        if not os.path.lexists(file):
            os.rename(self.source(spec), file)
            self._discard(spec)

    def snapshot(
        self, file: Path, name: str | None = None, below: Path = HERE, served: Served | None = None
    ) -> BatchSpec:
        """Copy the user's own file into a new batch: what happens to the file afterwards does not matter.

        Raises DllmError when the file changes while it is copied, UsageError when parameters beside it are wrong.
        """
        spec = self._plan(file, name, below=below).model_copy(update={"served": served})
        return self._keep(self._copy(file, spec), kinds.params_beside(file))

    def snapshot_once(self, file: Path, name: str | None = None, below: Path = HERE) -> tuple[BatchSpec, bool]:
        """As `snapshot`, but the batch that was submitted with the same content before, where there is one.

        Also whether it is a new one. Of two who do this at once, one makes the batch.
        """
        spec = self._plan(file, name, below=below)
        return self._keep_once(self._copy(file, spec), kinds.params_beside(file))

    def again(self, file: Path, spec: BatchSpec, name: str | None = None) -> BatchSpec:
        """A new batch that reads `file` as the batch of `spec` read it, with `spec`'s model and parameters."""
        kind, before = kinds.of(spec.source), Path(spec.output)
        assert kind is not None
        batch = f"{slug(name or kind.stem)}-{secrets.token_hex(ID_BYTES)}"
        output = str(before.parent / output_stem(name or before.name))
        changes = {
            "batch": batch,
            "output": claimed.reserve_output(output, batch, self.ledger, self.folders),
            "created_at": time.time(),
            "hours": None,
            "outputs_url": self.settings.outputs_url,
        }
        return self._keep(self._copy(file, spec.model_copy(update=changes)))

    def spool(
        self, chunks: Iterable[bytes], source: str, name: str | None = None, force: bool = False
    ) -> tuple[BatchSpec, bool]:
        """Write what comes in as bytes to the disk, and make a batch of it, its file called `source`.

        It lies hidden in the inbox until it is whole, so that no batch ever has a part of it. As of `snapshot_once`,
        comes the batch that has the same content already, unless `force`; and whether it is a new one.
        """
        with self._spooled(chunks, source[source.index(".") :]) as file:
            spec = self._plan(file, name, source)
            with self._or_discard(spec):
                claimed.write_manifest(spec, self.folders)
                os.rename(file, self._partial(spec))
                spec = self._identified(spec)
        return (self._keep(spec), True) if force else self._keep_once(spec)

    @contextlib.contextmanager
    def _spooled(self, chunks: Iterable[bytes], ending: str) -> Iterator[Path]:
        """A hidden file that holds `chunks`; gone afterwards, unless it was moved."""
        inbox = self.folders.inputs
        for left in inbox.glob(f"{SPOOL}*"):
            if time.time() - left.lstat().st_mtime > SPOOL_KEPT_S:
                left.unlink(missing_ok=True)
        file = inbox / f"{SPOOL}{secrets.token_hex(8)}{ending}"
        try:
            with file.open("wb") as stream:
                stream.writelines(chunks)
                stream.flush()
                os.fsync(stream.fileno())
            yield file
        finally:
            file.unlink(missing_ok=True)

    def _copy(self, file: Path, spec: BatchSpec) -> BatchSpec:
        """A copy of the file in the batch's folder, not yet under its name; the spec with its content."""
        with self._or_discard(spec):
            before = os.stat(file)
            claimed.write_manifest(spec, self.folders)
            size = copy_some(file, self._partial(spec), before.st_size + 1)
            after = os.stat(file)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != before.st_size:
                raise DllmError(f"{file} is being written: submit it when it is complete")
            return self._identified(spec)

    def _identified(self, spec: BatchSpec) -> BatchSpec:
        """The spec with the content of what lies in the batch's folder; its manifest says so too."""
        spec = spec.model_copy(update={"content": content(self._partial(spec), spec)})
        claimed.write_manifest(spec, self.folders)
        return spec

    def _keep_once(self, spec: BatchSpec, beside: Path | None = None) -> tuple[BatchSpec, bool]:
        """The batch that has the same content already, else this one; and whether it is this one."""
        with self.ledger.first_with(str(spec.content)):
            if other := self.ledger.with_content(str(spec.content)):
                self._discard(spec)
                return other.spec, False
            return self._keep(spec, beside), True

    def _keep(self, spec: BatchSpec, beside: Path | None = None) -> BatchSpec:
        """The copy gets its name, the parameters `beside` the file come along, and the ledger learns of the batch."""
        with self._or_discard(spec):
            if beside is not None:
                self._copy_params(beside, spec)
            publish(self._partial(spec), self.source(spec))
        claimed.record(spec, self.ledger, self.folders, self.via)
        return spec

    def _partial(self, spec: BatchSpec) -> Path:
        """Where a source lies that is not whole, or of which it is not known whether it is wanted."""
        return self.source(spec).with_name(PARTIAL)

    @contextlib.contextmanager
    def _or_discard(self, spec: BatchSpec) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._discard(spec)
            raise

    def pending(self, under_way: Collection[str] = ()) -> list[BatchSpec]:
        """Claimed batches that are not submitted to their end, the oldest first; those `under_way` left out.

        Finishes what a crash interrupted on the way: records batches that the ledger does not know, and sweeps
        folders that never got their source. Ten thousand claims that only wait for workers cost one round trip.
        """
        running = {batch for batch, state, _ in self.ledger.glance() if state is BatchState.RUNNING}
        known_of = running.union(under_way)
        folders = [folder for folder in claimed.entries(self.folders) if folder.name not in known_of]
        found = [spec for folder in folders if (spec := self._read_manifest(folder)) is not None]
        known = self.ledger.records([spec.batch for spec in found])
        readable = [spec for spec in found if known.get(spec.batch, spec) is not None]
        open_ones = [self._settle(spec, known.get(spec.batch)) for spec in readable]
        return sorted((spec for spec in open_ones if spec), key=lambda spec: spec.created_at)

    def _settle(self, spec: BatchSpec, batch: Batch | None) -> BatchSpec | None:
        """`spec` when it has rows to submit."""
        if not self.source(spec).exists():
            self._without_source(spec, batch)
            return None
        self._finish_params(spec)
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

    def _copy_params(self, beside: Path, spec: BatchSpec) -> None:
        """Put a file's parameters into its claim: a second name where the file system has links, else a copy."""
        if not kinds.is_file(beside):
            return
        target = self.source(spec).with_name(beside.name)
        try:
            os.link(beside, target)
        except OSError:
            shutil.copyfile(beside, target)

    def _finish_params(self, spec: BatchSpec) -> None:
        """A crash may have left the parameters of a taken file in the inbox, where they would be another's."""
        for kept in self.source(spec).parent.glob(f"*{kinds.PARAMS}"):
            beside = self.folders.inputs / Path(spec.output).parent / kept.name
            if beside.exists() and beside.samefile(kept) and not _needed(beside):
                beside.unlink()

    def _plan(self, file: Path, name: str | None, source: str | None = None, below: Path = HERE) -> BatchSpec:
        spec = planned(file, self.settings, self._columns, name, source)
        wanted = str(mirrored(below) / spec.output)
        output = claimed.reserve_output(wanted, spec.batch, self.ledger, self.folders)
        return spec.model_copy(update={"output": output})

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


def copy_some(source: Path, target: Path, most: int) -> int:
    """Copy no more than `most` bytes, for a source may grow faster than it is read; returns how many there were."""
    left = most
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(min(left, COPIED)):
            left -= writer.write(chunk)
    return most - left


def content(file: Path, spec: BatchSpec) -> str:
    """A hash of the file's bytes and of all that is asked for them that changes what is published."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    digest.update(spec.model_dump_json(exclude=NOT_CONTENT).encode())
    return digest.hexdigest()


def planned(
    file: Path, settings: ProducerSettings, columns: Columns, name: str | None = None, source: str | None = None
) -> BatchSpec:
    """The batch that `file` would be, its output name not reserved. Raises UsageError for its parameters."""
    kind = kinds.of(file.name)
    assert kind is not None
    params, params_line = kinds.own_params(file, settings.params)
    stem = name or (kind.stem if source is None else source[: source.index(".")])
    now = time.time()
    return BatchSpec(
        batch=f"{slug(stem)}-{secrets.token_hex(ID_BYTES)}",
        source=source or file.name,
        output=output_stem(stem),
        kind=kind.kind,
        packed=kind.packed,
        txt_mode=settings.txt_mode,
        params_line=params_line,
        columns=columns,
        model=settings.queue_model,
        priority=settings.priority,
        params=params,
        created_at=now,
        hours=Hours.of(settings.not_before, settings.window, now),
        output_format=settings.output_format,
        prices=_prices(settings),
        outputs_url=settings.outputs_url,
    )


def columns(settings: ProducerSettings) -> Columns:
    """Where rows hold what, as the settings say, the template read. Raises SettingsError."""
    return Columns(
        prompt=settings.prompt_column,
        messages=settings.messages_column,
        id=settings.id_column,
        delimiter=settings.csv_delimiter,
        template=None if settings.template is None else _template(settings),
    )


def _template(settings: ProducerSettings) -> str:
    """The template's text without the line feed at its end; from the current folder, else from the root."""
    assert settings.template is not None
    file = settings.template if settings.template.exists() else settings.folders.root / settings.template
    try:
        text = file.read_text(encoding="utf-8-sig").removesuffix("\n")
        pieces(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"template {settings.template}: {why}") from None
    return text


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
    visible = OBEYED.sub("_", stem).strip().lstrip(".")
    short = visible.encode("utf-8", "replace")[:LONGEST_OUTPUT].decode("utf-8", "ignore")
    return re.sub(r"\.(errors|openai)$", r"-\1", short, flags=re.IGNORECASE) or "batch"


def mirrored(below: Path) -> Path:
    """`below` as a folder of outputs: it cannot have the name of a file of outputs."""
    visible = (OBEYED.sub("_", part) for part in below.parts)
    return Path(*(re.sub(r"\.(jsonl|txt|csv|parquet|json)$", r"_\1", part, flags=re.I) for part in visible))


def slug(stem: str) -> str:
    """`stem` in the letters that batch ids may have: A-Z, a-z, 0-9, dash and underscore."""
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_]+", "-", plain)[:LONGEST_SLUG].strip("-") or "batch"


def _needed(params: Path) -> bool:
    """Is there a file, still or again, that these parameters are for?"""
    try:
        names = os.listdir(params.parent) if params.exists() else []
    except FileNotFoundError:
        return False
    return any(kinds.of(name) is not None and kinds.params_beside(params.with_name(name)) == params for name in names)


def _remove(folder: Path) -> None:
    """Remove a claim's own files; a folder that holds anything else stays."""
    params = [entry.name for entry in folder.glob(f"*{kinds.PARAMS}")]  # the originals are where they were
    for name in (MANIFEST, f".{MANIFEST}.part", PARTIAL, *params):
        (folder / name).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if folder.exists():
            logs.get().warning("claim_left", folder=str(folder), reason=cast(str, error.strerror))
