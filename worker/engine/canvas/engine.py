"""The engine of models that denoise random tokens, with the front of `worker.engine.engine`.

A step is two forwards: one stores text that is finished (prompts, and canvases that are done) as far as the budget
goes, one denoises the canvases of all rows that have nothing left to store. Rows enter and leave between any two
steps, and see nothing of each other.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from contract.errors import BadPrompt, PromptFailure
from worker.engine.canvas.admission import admit
from worker.engine.canvas.context import Stretch
from worker.engine.canvas.memory import plan_memory
from worker.engine.canvas.model import CanvasModel
from worker.engine.canvas.row import CanvasRow
from worker.engine.canvas.sampling import Guess
from worker.engine.canvas.spec import CanvasSpec
from worker.engine.memory import is_out_of_memory
from worker.engine.places import Places
from worker.engine.request import Finished, Request
from worker.engine.stats import EngineStats, Stopwatch
from worker.engine.transfer import to_device
from worker.engine.unmasking import RULES
from worker.engine.unmasking.rule import Candidates


class CanvasEngine:
    """Denoises the canvases of any mix of rows together. Not thread-safe: one thread adds and steps.

    `max_step_tokens` bounds each forward; a canvas cannot be cut, so that no more rows run than canvases fit into it,
    but for `urgent_rows` more that are urgent.
    `memory_budget` is in bytes of keys and values, planned from free memory when not given. `exact_timing` makes the
    seconds in `stats` true on a GPU too, at the price of waiting for it within each step.
    """

    def __init__(
        self,
        spec: CanvasSpec,
        model: CanvasModel,
        max_rows: int = 32,
        max_step_tokens: int = 2048,
        memory_budget: int | None = None,
        exact_timing: bool = False,
        urgent_rows: int = 0,
    ) -> None:
        self.spec = spec
        self.model = model
        canvas = spec.decoder.canvas_length
        self.max_step_tokens = max(max_step_tokens, canvas)
        self.memory = plan_memory(spec, model, self.max_step_tokens + urgent_rows * canvas, memory_budget)
        self.places = Places[CanvasRow](min(max_rows, self.max_step_tokens // canvas), urgent_rows, self.memory)
        self.stats = EngineStats()
        self._exact_timing = exact_timing

    def add(self, request: Request) -> None:
        """Let a prompt wait for its first step. Raises BadPrompt when it can never run, here or anywhere."""
        row = admit(request, self.spec)
        if row.most_positions > (longest := self.memory.longest()):
            raise BadPrompt(
                "out_of_memory",
                f"prompt and answer may take {row.most_positions} positions, memory holds {longest}: lower "
                "max_new_tokens, shorten the prompt, or use a larger device",
            )
        self.places.add(row)

    @property
    def reused_positions(self) -> int:
        """Prompt positions that were computed for another prompt before: none, beginnings are not shared here."""
        return 0

    @property
    def max_rows(self) -> int:
        """Rows that run together at most, apart from what is there for urgent ones."""
        return self.places.max_rows

    @property
    def most_rows(self) -> int:
        """Rows that run together at most, urgent ones included."""
        return self.places.ceiling

    def room(self, urgent: bool = False) -> int:
        """How many more rows would run at once; the places that only urgent rows may take do not count for others."""
        return self.places.room(urgent)

    def in_the_way(self) -> Hashable | None:
        """The youngest row that is not urgent, while memory has no room for it and an urgent one: remove it."""
        return self.places.in_the_way()

    def active(self) -> list[Hashable]:
        """Ids of all rows in the engine, running and waiting."""
        return [row.request.id for row in (*self.places.running, *self.places.waiting)]

    def remove(self, request_id: Hashable) -> bool:
        """Drop a row without a result (it was given back or cancelled); False when it is not here."""
        return self.places.remove(request_id) is not None

    def progress(self, request_id: Hashable, since: int = 0) -> list[int]:
        """The row's answer from its `since`-th token on, as far as it is final: canvases that are done, up to a stop.

        Nothing for a row that waits. A row that had to begin anew has less for a while, and then the same.
        """
        row = self.places.find(request_id)
        return [] if row is None else row.final(since)

    def cut(self, request_id: Hashable, tokens: int) -> Finished:
        """End a running row: the first `tokens` of what is final are its answer."""
        row = self.places.find(request_id)
        assert row is not None
        self.remove(request_id)
        return row.finished(tokens)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Store what is finished, denoise each canvas once; the rows that ended with it."""
        self.places.admit()
        if not self.places.running:
            return []
        try:
            done = EngineStats(steps=1, rows=len(self.places.running)) + self._store() + self._denoise()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            done = None  # what the failed step holds is freed once the error is forgotten
        if done is None:
            self._shrink()
        else:
            self.stats += done
        ended = [row.finished() for row in self.places.running if row.done]
        self.places.running = [row for row in self.places.running if not row.done]
        return ended

    def _store(self) -> EngineStats:
        """One forward over finished text, that of urgent rows and the shortest first; a long one takes what is left."""
        parts: list[tuple[CanvasRow, Stretch]] = []
        tokens: list[int] = []
        unstored = [row for row in self.places.running if row.waiting]
        for row in sorted(unstored, key=lambda row: (not row.request.urgent, len(row.waiting))):
            if row.fits(left := self.max_step_tokens - len(tokens)):
                stretch, part = row.store(left)
                parts.append((row, stretch))
                tokens += part
        if not parts:
            return EngineStats()
        watch = self._stopwatch()
        self.model.store(to_device(tokens, torch.int64, self.model.device), [stretch for _, stretch in parts])
        watch.lap("forward")
        prefill = sum(stretch.length for row, stretch in parts if not row.answer)
        for row, stretch in parts:
            row.stored(stretch)
        each = watch.seconds["forward"] / len(tokens)
        return EngineStats(
            prefill_positions=prefill,
            commit_positions=len(tokens) - prefill,
            needed_positions=len(tokens),
            attention_cells=sum(stretch.cells for _, stretch in parts),
            attention_padded=sum(stretch.computed_cells for _, stretch in parts),
            prefill_s=each * prefill,
            commit_s=each * (len(tokens) - prefill),
        )

    def _denoise(self) -> EngineStats:
        """One forward over the canvases of all rows whose text is stored."""
        rows = [row for row in self.places.running if not row.waiting]
        if not rows:
            return EngineStats()
        watch = self._stopwatch()
        canvases = [row.open_canvas(self.model) for row in rows]
        stretches = [
            Stretch(row.context, len(canvas.tokens), False) for row, canvas in zip(rows, canvases, strict=True)
        ]
        tokens, soft = torch.cat([one.tokens for one in canvases]), torch.cat([one.soft for one in canvases])
        watch.lap("host")
        hidden = self.model.denoise(tokens, soft, stretches)
        watch.lap("forward")
        needed = sum(row.wanted for row in rows)
        self._decide(rows, hidden)
        watch.lap("logits")
        return EngineStats(
            denoise_positions=len(tokens),
            needed_positions=needed,
            predictions=len(tokens),
            attention_cells=sum(stretch.cells for stretch in stretches),
            attention_padded=sum(stretch.computed_cells for stretch in stretches),
            denoise_s=watch.seconds["forward"],
            logits_s=watch.seconds["logits"],
            host_s=watch.seconds["host"],
        )

    def _decide(self, rows: list[CanvasRow], hidden: Tensor) -> None:
        """hidden (R * C, d): every canvas is done, or goes on with what is accepted of it."""
        seen = [row.look(self.model, part) for row, part in zip(rows, hidden.chunk(len(rows)), strict=True)]
        accepted = self._accept(rows, seen)
        settled = torch.stack([row.settled(one) for row, one in zip(rows, seen, strict=True)])
        finite = torch.stack([one.entropy.isfinite().all() for one in seen])
        # One transfer to the host per step, and one for each canvas that is done.
        verdicts = torch.stack([settled, finite], dim=1).tolist()
        for row, one, mine, (is_settled, is_finite) in zip(rows, seen, accepted, verdicts, strict=True):
            if not is_finite:
                row.fail(PromptFailure("model_error", "the model computed something that is not a number"))
            elif is_settled:
                row.take(one.best.tolist())
            else:
                row.renoise(one, mine)

    def _accept(self, rows: list[CanvasRow], seen: list[Guess]) -> Tensor:
        """(R, C) bool: the proposals that each row's entropy bound lets stand."""
        entropy = torch.stack([one.entropy for one in seen])
        numbers = to_device([[row.plan.number] for row in rows], torch.float32, self.model.device)
        everywhere = torch.ones_like(entropy, dtype=torch.bool)
        return RULES[rows[0].plan.rule].accept(Candidates(-entropy, everywhere, numbers, numbers, entropy))

    def _shrink(self) -> None:
        """Memory did not suffice: go on with half of the rows, and never with more again. All of them begin anew.

        A row that is alone tries shorter forwards for its prompt, and fails when they are short already.
        """
        rows, canvas = self.places.running, self.spec.decoder.canvas_length
        if len(rows) == 1 and (not rows[0].waiting or self.max_step_tokens == canvas):
            rows[0].fail(PromptFailure("out_of_memory", "this prompt does not fit into memory, even alone"))
        else:
            if len(rows) > 1:
                self.places.halve()
            else:
                self.max_step_tokens = max(canvas, self.max_step_tokens // 2)
            self.places.running = []
            for row in reversed(rows):
                self.places.add(CanvasRow(row.request, row.plan, self.spec), front=True)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _stopwatch(self) -> Stopwatch:
        return Stopwatch(self.model.device, self._exact_timing)
