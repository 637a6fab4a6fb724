"""One throughput record per micro-batch: as many prompts as run together, from the first one's admission until all of
them have ended. Rows of several micro-batches run side by side, because rows enter whenever others leave."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from worker.engine import EngineStats, Finished


@dataclass
class MicroBatch:
    """Counts of the prompts admitted to it."""

    id: int
    before: EngineStats
    started: float = field(default_factory=time.perf_counter)
    admitted: int = 0
    open_rows: int = 0
    unfinished: int = 0  # failed, to be retried, or begun anew apart from others
    queued_s: float = 0.0  # summed over rows
    prompt_tokens: int = 0
    output_tokens: int = 0
    row_seconds: float = 0.0
    steps: int = 0
    forwards: int = 0
    positions: int = 0

    def admit(self, queued_s: float) -> None:
        """A prompt enters after it waited `queued_s` seconds in the queue."""
        self.admitted += 1
        self.open_rows += 1
        self.queued_s += queued_s

    def count(self, finished: Finished | None) -> None:
        """A prompt leaves; None when it has no answer."""
        self.open_rows -= 1
        if finished is None:
            self.unfinished += 1
            return
        self.prompt_tokens += finished.prompt_tokens
        self.output_tokens += len(finished.token_ids)
        self.row_seconds += finished.seconds
        self.steps += finished.steps
        self.forwards += finished.forwards
        self.positions += finished.positions

    def record(self, after: EngineStats) -> dict[str, Any]:
        """The `batch_throughput` record.

        Tokens, forwards and positions are those of this micro-batch's own rows; `padding_share` is the engine's over
        the same time: the share of computed query-key pairs that nobody wanted.
        """
        seconds = time.perf_counter() - self.started
        padded = after.attention_padded - self.before.attention_padded
        cells = after.attention_cells - self.before.attention_cells
        return {
            "micro_batch": self.id,
            "rows": self.admitted,
            "unfinished": self.unfinished,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seconds": round(seconds, 3),
            "row_seconds": round(self.row_seconds, 3),
            "output_tokens_per_s": round(self.output_tokens / seconds, 2),
            "steps": self.steps,
            "forwards": self.forwards,
            "tokens_per_forward": round(self.output_tokens / self.forwards, 3) if self.forwards else 0.0,
            "positions": self.positions,
            "padding_share": round(1 - cells / padded, 4) if padded else 0.0,
            "queue_wait_s": round(self.queued_s / self.admitted, 3),
        }


class TokenRate:
    """Tokens per second over the last `span_s` seconds, from a running total that is looked at now and then."""

    def __init__(self, span_s: float = 60.0) -> None:
        self._span_s = span_s
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, tokens: int, now: float) -> float:
        """The rate, `tokens` being the total at the moment `now`; 0.0 at the first look."""
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._span_s:
            self._seen.popleft()
        since, before = self._seen[0]
        return round((tokens - before) / (now - since), 2) if now > since else 0.0
