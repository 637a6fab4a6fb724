"""The answer cache: answers given before, for rows that ask the same of the same model again, in whatever batch.

Between the intake and the engine, and off unless `answer_cache_mb` is set. A file an answer under the root that all
machines share, `.answers/ab/cd/{key}`: the key is a digest of model, parameters and the prompt's tokens. Knows no
queue and no batch; failures never come here, and neither does what is drawn without a seed, for then another draw is
what was asked for.

Nothing is locked and nothing has to last: a file is renamed into place whole, one that was torn, changed or moved does
not have the digest that it begins with and counts as none. Keys are spread evenly, so each of the 256 folders is kept
below its share of the limit, by whoever writes to it: the oldest answers go, those of use lately count as new.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict

from contract import logs
from contract.jobs import Completion, FinishReason, Usage
from contract.sampling import SamplingParams

KEY = 32
"""Bytes of a key and of the digest before an answer."""
SHARDS = 256
BLOCK = 4096
"""What a small file takes on a disk: sizes are counted in these."""
KEPT = 0.9
"""Pruning leaves so much of the limit."""
UNPRUNED = 1 / 16
"""A worker looks at a folder again when it wrote so much of its limit into it: others may have written as well."""
FRESH_S = 600.0
"""An answer that was of use is marked as new no more often than this."""
TORN_S = 3600.0
"""A part that is older was left by a crash."""
PENDING = 1_000
"""Answers that wait to be written; beyond it they are not kept."""


class Kept(BaseModel):
    """What is kept of an output row: all that does not depend on which row asked, and when."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    output: str
    finish_reason: FinishReason
    notes: list[str]
    usage: Usage
    params: dict[str, Any]

    @classmethod
    def of(cls, row: Completion) -> Kept:
        params = {name: value for name, value in row.params.items() if name not in ("timeout_s", "seed")}
        return cls(output=row.output, finish_reason=row.finish_reason, notes=row.notes, usage=row.usage, params=params)


class Answers:
    """The cache as one worker uses it; a context manager, inside of which answers are kept by a thread of its own.

    `limit_mb` is 0 where it is off: then nothing has a key, and nothing else happens. `identity` is that of
    `worker.fingerprint`; `always_samples` is said of models that draw whatever the temperature.
    """

    def __init__(
        self, folder: Path = Path(), limit_mb: int = 0, identity: bytes = b"", always_samples: bool = False
    ) -> None:
        self._folder = folder
        self._limit = (limit_mb << 20) // SHARDS
        self._identity = identity
        self._always_samples = always_samples
        self._written: dict[str, int] = {}
        self._pending: queue.Queue[str | None] = queue.Queue(PENDING)
        self._waiting: dict[str, Kept] = {}
        self._thread: threading.Thread | None = None
        self._told = False

    def __enter__(self) -> Answers:
        if self._limit:
            self._thread = threading.Thread(target=self._write_all, name="answers", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()

    def key(self, prompt_ids: Sequence[int], params: SamplingParams) -> str | None:
        """The key of a request, `params` as the row has them; None for one whose answer must not be another's."""
        if not self._limit:
            return None
        drawn = self._always_samples or params.temperature > 0
        if drawn and params.seed is None:
            return None
        asked = params.model_dump_json(exclude={"timeout_s"} if drawn else {"timeout_s", "seed"})
        digest = hashlib.blake2b(self._identity, digest_size=KEY)
        digest.update(f"{len(asked)} {asked}".encode())
        digest.update(array("q", prompt_ids).tobytes())
        return digest.hexdigest()

    def find(self, key: str | None) -> Kept | None:
        """The answer kept under `key`, if there is one that is whole."""
        if key is None:
            return None
        if waiting := self._waiting.get(key):
            return waiting
        file = self._file(key)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell(error)
            return None
        try:
            if content[:KEY] != _checked(key, content[KEY:]):
                raise ValueError("torn")
            answer = Kept.model_validate_json(content[KEY:])
        except ValueError:
            with suppress(OSError):
                file.unlink()
            return None
        self._freshen(file)
        return answer

    def keep(self, key: str | None, row: Completion) -> None:
        """Have the answer of `row` written, some time soon; while too many wait, it is not kept."""
        if key is not None and key not in self._waiting:
            self._waiting[key] = Kept.of(row)
            try:
                self._pending.put_nowait(key)
            except queue.Full:
                del self._waiting[key]

    def _file(self, key: str) -> Path:
        return self._folder / key[:2] / key[2:4] / key

    def _freshen(self, file: Path) -> None:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > FRESH_S:
                os.utime(file)

    # The thread

    def _write_all(self) -> None:
        while (key := self._pending.get()) is not None:
            try:
                self._write(key, self._waiting[key])
            except (OSError, ValueError) as error:  # a full disk; half a surrogate pair, which has no UTF-8
                self._tell(error)
            self._waiting.pop(key, None)

    def _write(self, key: str, answer: Kept) -> None:
        content = answer.model_dump_json().encode()
        size = _on_disk(KEY + len(content))
        if size > self._limit:
            return
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{key}.{os.getpid()}.part")
        try:
            part.write_bytes(_checked(key, content) + content)
            os.replace(part, file)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._count(key[:2], size)

    def _count(self, shard: str, size: int) -> None:
        written = self._written.get(shard)
        self._written[shard] = (written or 0) + size
        if written is None or self._written[shard] > self._limit * UNPRUNED:
            prune(self._folder / shard, self._limit)
            self._written[shard] = 0

    def _tell(self, error: Exception) -> None:
        """Once: rows are answered all the same."""
        if not self._told:
            self._told = True
            logs.get().warning("answer_cache_failed", reason=str(error))


def prune(shard: Path, limit: int) -> None:
    """Remove the oldest answers of a folder that takes more than `limit` bytes, and parts that crashes left."""
    found: list[tuple[float, int, Path]] = []
    for file in shard.glob("*/*"):
        with suppress(OSError):  # somebody else prunes too
            stat = file.stat()
            if not file.name.startswith("."):
                found.append((stat.st_mtime, _on_disk(stat.st_size), file))
            elif time.time() - stat.st_mtime > TORN_S:
                file.unlink()
    taken = sum(size for _, size, _ in found)
    if taken <= limit:
        return
    for _, size, file in sorted(found):
        if taken <= limit * KEPT:
            return
        with suppress(OSError):
            file.unlink()
        taken -= size


def _on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _checked(key: str, content: bytes) -> bytes:
    """The digest before `content`, which holds under that key only."""
    return hashlib.blake2b(content, digest_size=KEY, key=key.encode()).digest()
