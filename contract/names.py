"""What an installation's things are called on a server, so that several installations can share one.

Every key of ours begins with the prefix and a colon, every queue's name with the prefix and a dash, and a worker that
is not of the default prefix is known to RQ as `{prefix}@{name}`. RQ's own keys are `rq:` and a queue's name, a worker's
name or a job's id. The latter is that of its batch and a number, and batch ids are random enough to be nobody else's.
Prefixes hold no dash and workers' names no `@`, so no name of one installation can be one of another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from redis import Redis

from contract.jobs import Priority

DEFAULT = "dllm"
PATTERN = r"^[A-Za-z0-9_]{1,32}$"


@dataclass(frozen=True)
class Names:
    """The names of one installation. The key patterns of scripts are made with `%s` for a batch."""

    prefix: str = DEFAULT

    def key(self, *words: str) -> str:
        return ":".join((self.prefix, *words))

    def batch(self, batch: str, part: str | None = None) -> str:
        """Key of a batch's record, or of one part of it."""
        return self.key("batch", batch, part) if part else self.key("batch", batch)

    def backlog(self, batch: str) -> str:
        """Key of the rows of `batch` that nobody has taken yet."""
        return self.batch(batch, "backlog")

    def turns(self, queue: str) -> str:
        return self.key("turns", queue)

    def hours(self, queue: str) -> str:
        return self.key("hours", queue)

    def queue(self, model: str, priority: Priority) -> str:
        """`{prefix}-{model}-{priority}` with anything but letters, digits, dot and dash replaced by `_`."""
        return f"{self.prefix}-{re.sub(r'[^A-Za-z0-9.-]', '_', model)}-{priority}"

    def owns(self, queue: str) -> bool:
        """Is that a queue of this installation?"""
        return queue.partition("-")[0] == self.prefix

    def registered(self, worker: str) -> str:
        """The name under which RQ knows one of our workers."""
        return worker if self.prefix == DEFAULT else f"{self.prefix}@{worker}"

    def plain(self, registered: str) -> str:
        """The name of the worker that RQ knows as `registered`."""
        return registered.removeprefix(f"{self.prefix}@")


class Connection(Redis):
    """A connection to the server of one installation; answers in bytes, as RQ needs."""

    names: Names = Names()
