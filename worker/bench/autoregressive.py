"""transformers' `generate` on the base model, batched at the same number of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from worker.bench.base import ensure_base
from worker.bench.driving import Pass
from worker.bench.systems import Workload, shortened
from worker.engine import Request


class Autoregressive:
    """Greedy `generate`: batches in the set's order, left padding, a batch ends when its last row has."""

    name: ClassVar[str] = "ar"

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._stop_ids = sorted(workload.loaded.spec.stop_ids)
        self._batches: list[Sequence[Request]] = []
        self._model: Any = None

    def prepare(self) -> None:
        """The warm-up runs batches until the budget is spent; those are the batches of every round."""
        # Imported here: transformers takes seconds to import.
        from transformers import AutoModelForCausalLM

        decoder = self._workload.loaded.decoder
        folder = ensure_base(self._workload.base)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=decoder.dtype).to(decoder.device).eval()
        self.answers(shortened(self._workload.requests[: self._workload.rows]))
        started = time.perf_counter()
        for first in range(0, len(self._workload.requests), self._workload.rows):
            self._batches.append(self._workload.requests[first : first + self._workload.rows])
            self.answers(self._batches[-1])
            if time.perf_counter() - started > self._workload.budget_s:
                break

    def run(self) -> Pass:
        started = time.perf_counter()
        tokens = sum(len(answer) for batch in self._batches for answer in self.answers(batch))
        return Pass(time.perf_counter() - started, tokens)

    def answers(self, batch: Sequence[Request]) -> list[list[int]]:
        """Each row's tokens up to its stop token and its own `max_new_tokens`."""
        width = max(len(request.prompt_ids) for request in batch)
        padding = [width - len(request.prompt_ids) for request in batch]
        pad_id = self._stop_ids[0]
        ids = [[pad_id] * pad + list(request.prompt_ids) for pad, request in zip(padding, batch, strict=True)]
        attend = [[0] * pad + [1] * (width - pad) for pad in padding]
        device = self._workload.loaded.decoder.device
        limits = torch.tensor([request.params.max_new_tokens for request in batch], device=device)
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(attend, device=device),
                max_new_tokens=int(limits.max()),
                do_sample=False,
                eos_token_id=self._stop_ids,
                pad_token_id=pad_id,
                stopping_criteria=_own_limits(width, limits),
            )
        rows: list[list[int]] = out[:, width:].tolist()
        return [self._cut(row, request.params.max_new_tokens) for row, request in zip(rows, batch, strict=True)]

    def _cut(self, tokens: list[int], limit: int) -> list[int]:
        end = next((at for at, token in enumerate(tokens[:limit]) if token in self._stop_ids), limit)
        return tokens[:end]

    def conditions(self) -> dict[str, Any]:
        return {
            "prompts": sum(len(batch) for batch in self._batches),
            "rows": self._workload.rows,
            "subset": "whole batches in the set's order, within the budget",
            "generate": "greedy, left padding; a row ends at its own max_new_tokens, a batch with its last row",
            "model": "base",
        }


def _own_limits(width: int, limits: Tensor) -> Any:
    """A row counts as ended at its own limit, so that a batch stops sooner than at its largest `max_new_tokens`."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class OwnLimits(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return input_ids.shape[1] - width >= limits

    return StoppingCriteriaList([OwnLimits()])
