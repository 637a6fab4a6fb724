"""Failed rows are queued again, as `producer retry` does it, in a thread: a batch of a million rows takes its time.

One at a time, in the order in which they were asked for. What became of the last ones is told on the page.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from redis.exceptions import RedisError

from contract import audit, logs, sealing
from contract.errors import DllmError
from contract.jobs import ErrorCode
from contract.ledger import Ledger
from contract.paths import Folders

PATIENCE_S = 3.0
"""Who asks waits so long to see what became of it."""
TOLD = 5
WAITING = 20


@dataclass(frozen=True)
class Wanted:
    """Failed rows of a batch: all of them, those with a code, or the one with an id."""

    batch: str
    code: ErrorCode | None = None
    id: str | None = None

    def __str__(self) -> str:
        which = f"row {self.id} of" if self.id is not None else f"{self.code} in" if self.code else "all failed rows of"
        return f"{which} {self.batch}"


class Retrying:
    """Made once for each application; its thread begins with the first row that is wanted."""

    def __init__(self, ledger: Ledger, folders: Folders) -> None:
        self._ledger = ledger
        self._folders = folders
        self._guard = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="retrying")
        self._under_way: dict[Wanted, Future[None]] = {}
        self._told: deque[str] = deque(maxlen=TOLD)

    def want(self, wanted: Wanted, who: str) -> None:
        """Returns when it is done, or is taking longer. What is asked for twice at a time is done once."""
        with self._guard:
            if wanted not in self._under_way:
                if len(self._under_way) >= WAITING:
                    self._told.append(f"{wanted}: too many are under way: try again later")
                    return
                self._under_way[wanted] = self._thread.submit(self._retry, wanted, who)
            future = self._under_way[wanted]
        wait([future], PATIENCE_S)

    @property
    def told(self) -> list[str]:
        """What is under way, and what became of the last ones, the newest first."""
        with self._guard:
            return [f"{wanted}: being queued again …" for wanted in self._under_way] + list(reversed(self._told))

    def _retry(self, wanted: Wanted, who: str) -> None:
        told = self._outcome(wanted, who)
        with self._guard:
            self._told.append(f"{wanted}: {told}")
            del self._under_way[wanted]

    def _outcome(self, wanted: Wanted, who: str) -> str:
        codes: Collection[ErrorCode] | None = {wanted.code} if wanted.code else None
        ids = [wanted.id] if wanted.id is not None else None
        try:
            rows = sealing.retry(wanted.batch, codes, self._ledger, self._folders, self._ledger.redis, ids)
        except (DllmError, OSError) as error:
            return str(error)
        except RedisError:
            return "Redis does not answer: try again"
        except Exception:  # noqa: BLE001 - told on the page, and the next one is not held up
            logs.get(batch=wanted.batch).exception("retry_failed")
            return "failed: the log says why"
        audit.requeued(wanted.batch, rows, f"dashboard:{who}")
        return (
            f"{rows} {'row' if rows == 1 else 'rows'} queued again" if rows else "no failed row could be queued again"
        )
