"""The engine: token ids in, token ids out. No Redis, no files, no tokenizer.

`step()` is the whole architecture: the scheduler chooses spans, the runner makes one ragged forward of them and
decides tokens, rows take them, and those that ended leave. Rows enter and leave between any two steps.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from contract.errors import BadPrompt, PromptFailure
from worker.engine.admission import admit
from worker.engine.memory import is_out_of_memory, plan_memory
from worker.engine.models.decoders import AnyDecoder
from worker.engine.models.spec import ModelSpec
from worker.engine.prefixes import Prefixes
from worker.engine.request import Finished, Request
from worker.engine.runner import ModelRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Row, State
from worker.engine.stats import EngineStats, Stopwatch, step_stats

SHORTEST_CHUNK = 64
"""Positions below which shorter prefill chunks save no memory worth having."""


class Engine:
    """Denoises any mix of rows together. Not thread-safe: one thread adds and steps.

    `urgent_rows` is how many rows over `max_rows` may run if they are urgent.
    `memory_budget` is in bytes of keys and values, planned from free memory when not given. `prefix_cache_mb` is for
    beginnings that prompts share; 0 turns sharing off. `exact_timing` makes the seconds in `stats` true on a GPU too,
    at the price of waiting for it within each step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        decoder: AnyDecoder,
        max_rows: int = 32,
        max_step_tokens: int = 2048,
        prefix_cache_mb: int = 256,
        memory_budget: int | None = None,
        exact_timing: bool = False,
        urgent_rows: int = 0,
    ) -> None:
        self.spec = spec
        self.runner = ModelRunner(spec, decoder)
        self.memory = plan_memory(decoder, self.runner.slots.bytes_per_position, max_step_tokens, memory_budget)
        self.scheduler = Scheduler(max_rows, max_step_tokens, self.memory, urgent_rows)
        self.prefixes = Prefixes(self.runner.slots, prefix_cache_mb << 20)
        self.stats = EngineStats()
        self._exact_timing = exact_timing
        self._next_key = 0

    def add(self, request: Request) -> None:
        """Let a prompt wait for its first step. Raises BadPrompt when it can never run, here or anywhere."""
        row = self._row(request)
        if row.most_positions > (longest := self.memory.longest()):
            raise BadPrompt(
                "out_of_memory",
                f"prompt and answer may take {row.most_positions} positions, memory holds {longest}: lower "
                f"max_new_tokens by {row.most_positions - longest}, shorten the prompt, or use a larger device",
            )
        self.scheduler.add(row)

    def _row(self, request: Request) -> Row:
        self._next_key += 1
        return admit(self._next_key, request, self.spec)

    def _again(self, row: Row) -> Row:
        """The same row from its beginning, with the plan that it was admitted with."""
        self._next_key += 1
        return type(row)(self._next_key, row.request, row.plan, self.spec)

    @property
    def max_rows(self) -> int:
        """Rows that run together at most, apart from what is there for urgent ones."""
        return self.scheduler.max_rows

    @property
    def reused_positions(self) -> int:
        """Prompt positions that were computed for another prompt before."""
        return self.prefixes.reused

    @property
    def most_rows(self) -> int:
        """Rows that run together at most, urgent ones included."""
        return self.scheduler.ceiling

    def room(self, urgent: bool = False) -> int:
        """How many more rows would run at once; the places that only urgent rows may take do not count for others."""
        return self.scheduler.room(urgent)

    def in_the_way(self) -> Hashable | None:
        """The youngest row that is not urgent, while memory has no room for it and an urgent one: remove it."""
        return self.scheduler.in_the_way()

    def active(self) -> list[Hashable]:
        """Ids of all rows in the engine, running and waiting."""
        return [row.request.id for row in (*self.scheduler.running, *self.scheduler.waiting)]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """One forward over the scheduled rows; the rows that ended with it."""
        watch = Stopwatch(self.runner.decoder.device, self._exact_timing)
        self.scheduler.admit()
        self._share_prefixes()
        chosen = self.scheduler.step()
        if not chosen:
            return []
        rows, spans = [row for row, _ in chosen], [span for _, span in chosen]
        try:
            decided = self.runner.run(rows, spans, watch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            decided = None  # what the failed step holds is freed once the error is forgotten
        if decided is None:
            return self._shrink(rows)
        for row, span, tokens in zip(rows, spans, decided, strict=True):
            if -1 in tokens:
                row.fail(PromptFailure("model_error", "the model computed something that is not a number"))
            else:
                row.receive(span, tokens)
                if span.prefilled:
                    self.prefixes.computed(row)
        ended = [self._retire(row) for row in self.scheduler.retire()]
        watch.lap("host")
        attention = self.runner.last_attention
        self.stats += step_stats(spans, attention.cells, attention.padded_cells, watch)
        return ended

    @torch.inference_mode()
    def remove(self, request_id: Hashable) -> bool:
        """Drop a row without a result (it was given back or cancelled); False when it is not here."""
        row = self.scheduler.remove(request_id)
        if row is not None:
            self._release(row)
        return row is not None

    def progress(self, request_id: Hashable, since: int = 0) -> list[int]:
        """The row's answer from its `since`-th token on, as far as it is final: whole blocks, up to a stop token.

        Nothing for a row that waits. A row that had to begin anew has less for a while, and then the same.
        """
        row = self.scheduler.find(request_id)
        return [] if row is None else row.final(since)

    def cut(self, request_id: Hashable, tokens: int) -> Finished:
        """End a running row: the first `tokens` of what is final are its answer."""
        row = self.scheduler.find(request_id)
        assert row is not None
        self.remove(request_id)
        return row.finished(tokens)

    def _shrink(self, rows: list[Row]) -> list[Finished]:
        """Memory did not suffice: go on with half of the rows, and never with more again. The others begin anew.

        A row that is alone tries shorter prefill chunks, and fails when they are short already.
        """
        if len(self.scheduler.running) > 1:
            for row in reversed(self.scheduler.halve()):
                self.remove(row.request.id)
                self.scheduler.add(self._again(row), front=True)
        elif rows[0].state is State.PREFILLING and self.scheduler.max_step_tokens > SHORTEST_CHUNK:
            self.scheduler.max_step_tokens = max(SHORTEST_CHUNK, self.scheduler.max_step_tokens // 2)
        else:
            rows[0].fail(PromptFailure("out_of_memory", "this prompt does not fit into memory, even alone"))
        if self.runner.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        return [self._retire(row) for row in self.scheduler.retire()]

    def _retire(self, row: Row) -> Finished:
        assert row.state is State.FINISHED
        self._release(row)
        return row.finished()

    def _release(self, row: Row) -> None:
        self.prefixes.leave(row.key)
        self.scheduler.held.discard(row.key)
        self.runner.release(row)

    def _share_prefixes(self) -> None:
        """Rows that have not begun take what is known of their prompts, or wait for the row that computes it."""
        for row in self.scheduler.running:
            if not row.entered:
                row.entered = self.prefixes.enter(row)
                (self.scheduler.held.discard if row.entered else self.scheduler.held.add)(row.key)
