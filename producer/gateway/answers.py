"""Replies in OpenAI's words: a whole answer, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.interactive import INTERACTIVE_PREFIX
from contract.jobs import Completion
from producer.gateway.dispatch import Part

EXACT = 4
"""Digits of tokens per forward."""


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer share. There are `n` choices for each prompt, in their order."""

    request: str
    model: str
    chat: bool
    n: int = 1
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, ends: Sequence[Part]) -> dict[str, Any]:
        """`chat.completion` or `text_completion`."""
        told = [end for part in ends if (end := part.end)]
        choices = [self._choice(part, _message(part) if self.chat else {"text": _text(part)}) for part in ends]
        return {**self._head(""), "choices": choices, "usage": usage(told, self.n), "denoise": denoise(told)}

    def opening(self, choice: int) -> dict[str, Any] | None:
        """A chat's first event for a choice."""
        return self._event(choice, {"delta": {"role": "assistant", "content": ""}}) if self.chat else None

    def more(self, choice: int, text: str) -> dict[str, Any]:
        return self._event(choice, {"delta": {"content": text}} if self.chat else {"text": text})

    def last(self, part: Part) -> dict[str, Any]:
        """A choice's last event: why it ended, and how it was denoised."""
        assert part.end is not None
        told: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return {**self._head(".chunk"), "choices": [self._choice(part, told)], "denoise": part.end.denoise}

    def usage(self, ends: Sequence[Completion]) -> dict[str, Any]:
        """The event after all others, for those who ask for it."""
        return {**self._head(".chunk"), "choices": [], "usage": usage(ends, self.n), "denoise": denoise(ends)}

    def _head(self, end: str) -> dict[str, Any]:
        number = self.request.removeprefix(INTERACTIVE_PREFIX)
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{number}",
            "object": f"chat.completion{end}" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }

    def _event(self, choice: int, told: Mapping[str, Any]) -> dict[str, Any]:
        one = {"index": choice, **told, "logprobs": None, "finish_reason": None}
        return {**self._head(".chunk"), "choices": [one]}

    def _choice(self, part: Part, told: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": part.choice, **told, "logprobs": None, "finish_reason": finish_reason(part)}


def finish_reason(part: Part) -> str:
    assert part.end is not None
    return "content_filter" if part.refused else part.end.finish_reason


def usage(ends: Sequence[Completion], n: int = 1) -> dict[str, int]:
    """Each prompt counts once, however many answers it has."""
    prompt = sum(end.usage.prompt_tokens for end in ends if end.index % n == 0)
    answers = sum(end.usage.completion_tokens for end in ends)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def denoise(ends: Sequence[Completion]) -> dict[str, int | float]:
    """Steps and forwards of all choices together."""
    steps, forwards = (int(sum(end.denoise.get(name, 0) for end in ends)) for name in ("steps", "forwards"))
    tokens = sum(end.usage.completion_tokens for end in ends)
    return {
        "steps": steps,
        "forwards": forwards,
        "tokens_per_forward": round(tokens / forwards, EXACT) if forwards else 0.0,
    }


def _text(part: Part) -> str:
    return "" if part.refused or part.end is None else part.end.output


def _message(part: Part) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": _text(part), "refusal": None}}
