"""What the engine must know about a checkpoint that denoises random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from worker.engine.models.spec import TextFacts

GENERATION = "generation_config"
"""The field in which the loader hands a family the contents of the checkpoint's `generation_config.json`."""


@dataclass(frozen=True)
class CanvasShape:
    """Sizes that matter outside the forward pass."""

    vocab_size: int
    max_positions: int
    canvas_length: int
    window: int
    """Sliding layers: a token sees this many, itself included, and window - 1 of finished text are held."""


@dataclass(frozen=True)
class CanvasSpec(TextFacts):
    """A checkpoint's family facts.

    text: the `text_config` that transformers' classes are built from, only fields that are understood.
    A canvas is denoised in at most `denoise_steps`, at temperatures that fall from `hottest` towards `coldest`. It is
    done once its argmax was the same for `stable_steps` steps before and the mean entropy is below `sure_entropy` nats.
    """

    mask_id: ClassVar[None] = None  # noise is uniform over the vocabulary

    family: str
    decoder: CanvasShape
    text: Mapping[str, Any] = field(hash=False)
    stop_ids: frozenset[int]
    denoise_steps: int
    hottest: float
    coldest: float
    entropy_bound: float
    stable_steps: int
    sure_entropy: float

    def temperature(self, step: int, steps: int) -> float:
        """Of step 1 … steps: a line from `hottest` at step 1 that would reach `coldest` one step after the last."""
        return self.coldest + (self.hottest - self.coldest) * (steps + 1 - step) / steps
