"""Where the rows and published files of batches lie: `batch_outputs/`, or an object store (`contract.objects`).

The seam between publishing and its place. Names are relative to the place: `b.jsonl`, `.segments/{batch}/{name}.jsonl`.
What is put there appears whole or not at all, and every reader sees it once the call has returned; nothing is renamed,
since object stores cannot. A store knows no ledger and nothing of what rows mean.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from contract import paths, segments
from contract.errors import StoreError
from contract.jobs import Row
from contract.ledger import BatchSpec
from contract.paths import Folders


def nothing() -> None:
    """What to do meanwhile for those who hold no lease."""


class Segment(Protocol):
    """The one writer of one batch's rows; a context manager."""

    def append(self, rows: Sequence[Row]) -> None:
        """Durable when it returns. Raises OSError; then none of `rows` counts as written."""

    def close(self) -> None: ...

    def __enter__(self) -> Segment: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A place for outputs. All methods may raise OSError. `keep` is called now and then while one takes its time."""

    def segment(self, batch: str, writer: str) -> Segment:
        """A writer of rows of `batch`, named as nobody else is at this moment."""

    def workplace(self, batch: str) -> AbstractContextManager[Path]:
        """A local folder for `segments` and for parts of what is to be published."""

    def segments(self, batch: str, workplace: Path, keep: Callable[[], None] = nothing) -> list[Path]:
        """The batch's segments as local files, the oldest first; some of them may have come to `workplace` for it."""

    def publish(self, part: Path, name: str, keep: Callable[[], None] = nothing) -> None:
        """Put `part`, a closed file of the workplace, there as `name`, over what was there. `part` may be gone then."""

    def open(self, name: str) -> BinaryIO:
        """For reading. Raises FileNotFoundError."""

    def there(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are there."""

    def size(self, name: str) -> int:
        """Bytes; 0 when it is not there."""

    def delete(self, name: str) -> None:
        """Also when it is not there."""

    def clear(self, batch: str, keep: Callable[[], None] = nothing) -> None:
        """Remove the batch's segments."""

    def put_aside(self, batch: str) -> str:
        """Keep the batch's segments where nobody looks for them; says where."""

    def shown(self, name: str) -> str:
        """Where a person finds it."""

    def check(self) -> None:
        """Raises StoreError when outputs cannot be written there."""


def of(folders: Folders, spec: BatchSpec | None = None) -> Store:
    """The store for outputs. Raises StoreError when `spec` tells that its batch has its rows elsewhere."""
    if spec is not None and spec.outputs_url != folders.outputs_url:
        theirs, ours = (url or "batch_outputs/" for url in (spec.outputs_url, folders.outputs_url))
        raise StoreError(
            f"batch '{spec.batch}' has its rows in {theirs}, and outputs go to {ours} here: "
            "set outputs_url to the same for it"
        )
    return _opened(folders)


@cache
def _opened(folders: Folders) -> Store:
    if folders.outputs_url is None:
        return Disk(folders)
    from contract import objects

    return objects.opened(folders.outputs_url, folders)


class Disk:
    """`batch_outputs/` under the root: segments are appended to, published files are renamed."""

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def segment(self, batch: str, writer: str) -> segments.SegmentWriter:
        return segments.SegmentWriter(self._folders, batch, writer)

    def workplace(self, batch: str) -> AbstractContextManager[Path]:
        return contextlib.nullcontext(self._folders.segments / batch)

    def segments(self, batch: str, workplace: Path, keep: Callable[[], None] = nothing) -> list[Path]:
        return segments.files(workplace)

    def publish(self, part: Path, name: str, keep: Callable[[], None] = nothing) -> None:
        target = self._folders.outputs / name
        paths.make(target.parent)
        paths.publish(part, target)

    def open(self, name: str) -> BinaryIO:
        return (self._folders.outputs / name).open("rb")

    def there(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if os.path.lexists(self._folders.outputs / name)]

    def size(self, name: str) -> int:
        try:
            return (self._folders.outputs / name).stat().st_size
        except FileNotFoundError:
            return 0

    def delete(self, name: str) -> None:
        (self._folders.outputs / name).unlink(missing_ok=True)

    def clear(self, batch: str, keep: Callable[[], None] = nothing) -> None:
        shutil.rmtree(self._folders.segments / batch, ignore_errors=True)

    def put_aside(self, batch: str) -> str:
        aside = self._folders.orphans
        aside.mkdir(exist_ok=True)
        target = aside / batch
        if target.exists():
            target = aside / f"{batch}.{time.time_ns()}"
        (self._folders.segments / batch).rename(target)
        return str(target)

    def shown(self, name: str) -> str:
        return str(self._folders.outputs / name)

    def check(self) -> None:
        if not os.access(self._folders.segments, os.W_OK | os.X_OK):
            raise StoreError(f"{self._folders.segments} cannot be written: change its owner or choose another --root")
