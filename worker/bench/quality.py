"""How good answers are: against the same model with one token a step, and in the eyes of the base model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from worker.bench.reference import log_likelihood
from worker.bench.systems import with_params
from worker.engine import Finished, Loaded, Request

Answers = Mapping[Hashable, Finished]


def full_step(request: Request) -> Request:
    """The request with as many denoise steps as tokens: the most careful answer that the model gives."""
    steps = request.params.max_new_tokens
    return with_params(request, rule="fixed_steps", denoise_steps=steps, threshold=None, entropy_bound=None)


def agreement(answers: Answers, careful: Answers) -> float:
    """Share of positions that hold the same token, over all answers; of unequal lengths the longer one counts."""
    same = total = 0
    for name, mine in answers.items():
        theirs = careful[name].token_ids
        same += sum(a == b for a, b in zip(mine.token_ids, theirs, strict=False))
        total += max(len(mine.token_ids), len(theirs))
    return same / total if total else 1.0


def mean_log_likelihood(base: Loaded, requests: Sequence[Request], answers: Answers) -> float:
    """Mean ln p of an answer's tokens under the base model, in nats per token."""
    total = sum(log_likelihood(base, one.prompt_ids, answers[one.id].token_ids) for one in requests)
    tokens = sum(len(answers[one.id].token_ids) for one in requests)
    return total / tokens if tokens else 0.0
