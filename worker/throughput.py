"""One throughput record per micro-batch: the prompts taken in one go, from their arrival until the last one ended."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from worker.engine import EngineStats, Finished


@dataclass
class MicroBatch:
    """Prompts that were taken together. Rows of several micro-batches run side by side."""

    id: int
    open_rows: int
    before: EngineStats
    queued_s: float  # mean wait of its prompts in the queue
    started: float = field(default_factory=time.perf_counter)
    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    forwards: int = 0
    positions: int = 0

    def add(self, finished: Finished | None) -> bool:
        """Count a row that ended (None: it failed before or instead of finishing); True when it was the last one."""
        self.open_rows -= 1
        self.rows += 1
        if finished is None or finished.error is not None:
            self.failed += 1
        else:
            self.prompt_tokens += finished.prompt_tokens
            self.output_tokens += len(finished.token_ids)
            self.steps += finished.steps
            self.forwards += finished.forwards
            self.positions += finished.positions
        return self.open_rows == 0

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
            "rows": self.rows,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "seconds": round(seconds, 3),
            "output_tokens_per_s": round(self.output_tokens / seconds, 2),
            "steps": self.steps,
            "forwards": self.forwards,
            "tokens_per_forward": round(self.output_tokens / self.forwards, 3) if self.forwards else 0.0,
            "positions": self.positions,
            "padding_share": round(1 - cells / padded, 4) if padded else 0.0,
            "queue_wait_s": round(self.queued_s, 3),
            "peak_memory_mb": peak_memory_mb(),
        }


def peak_memory_mb() -> int:
    """The most memory this process has held, in megabytes (Linux counts kilobytes, macOS bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // (1 << 20) if sys.platform == "darwin" else peak // 1024
