"""The text of an answer while it comes into being, and where a stop text ends it.

What is shown of an answer before it ends must stay true: the pieces, end to end, are the output as far as it goes. So
nothing is shown that later tokens may still change (half a character, a byte that may be part of one, a word whose
spaces are cleaned up), nor what may be the beginning of a stop text. Knows no engine and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.tokenizing import Tokenizer

WINDOW = 256
"""Tokens decoded at a time, however long the answer is."""
CONTEXT = 32
"""Of which so many are known: a text is told from how its first tokens are decoded, spaces above all."""


@dataclass(frozen=True)
class Answer:
    """The text of an answer, and how many of its tokens it takes; `stopped` says that a stop text ended it."""

    text: str
    tokens: int
    stopped: bool = False


def answer(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str]) -> Answer:
    """What stands before the first of the `stops`. A token that holds the end of it, or begins the stop, counts."""
    text = tokenizer.decode(token_ids)
    end = first_of(stops, text)
    if end is None:
        return Answer(text, len(token_ids))
    fewest, most = 0, len(token_ids)
    while fewest < most:
        middle = (fewest + most) // 2
        if tokenizer.decode(token_ids[:middle]).startswith(text[:end]):
            most = middle
        else:
            fewest = middle + 1
    return Answer(text[:end], fewest, stopped=True)


def first_of(stops: Iterable[str], text: str, start: int = 0) -> int | None:
    """Where in `text` the first of the `stops` begins, from `start` on."""
    return min((at for stop in stops if (at := text.find(stop, start)) >= 0), default=None)


class Transcript:
    """What is known of one answer's text. `take` its tokens as they become final."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ends = [*stops, *([tokenizer.end_of_answer] if tokenizer.end_of_answer else [])]
        self.token_ids: list[int] = []
        self.stopped = False
        """Did a stop text come?"""
        self.shown = 0
        """Characters that `piece` has given."""
        self._text = ""
        self._over = False
        self._first = 0  # of the tokens that are decoded
        self._known = ""  # what of their text stands in `_text`

    def take(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens."""
        self.token_ids += token_ids
        settled = self._tokenizer.settled(self.token_ids)
        decoded = self._tokenizer.decode_raw(self.token_ids[self._first : settled])
        lasting = self._tokenizer.lasting(decoded)
        if self._over or not lasting.startswith(self._known):
            return
        before = len(self._text)
        self._text += lasting[len(self._known) :]
        self._known = lasting
        self._look(before)
        if settled - self._first >= WINDOW and lasting == decoded:
            self._first = settled - CONTEXT
            self._known = self._tokenizer.decode_raw(self.token_ids[self._first : settled])

    def piece(self) -> str:
        """What can be shown and was not yet."""
        end = len(self._text) if self._over else self._certain()
        if self._tokenizer.end_of_answer:
            end = len(self._text[:end].rstrip())  # spaces are dropped before it, and it may come yet
        piece = self._text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece

    def _look(self, before: int) -> None:
        """Cut the text where it ends, as `answer` does; what stood there `before` held no end."""
        start = max(0, before + 1 - max(map(len, self._ends), default=0))
        over = first_of(self._ends[len(self._stops) :], self._text, start)
        if over is not None:
            self._text = self._text[:over].rstrip()
        stop = first_of(self._stops, self._text, start)
        if stop is not None:
            self._text, self.stopped = self._text[:stop], True
        self._over = over is not None or self.stopped

    def _certain(self) -> int:
        """Where what may yet become an end begins."""
        kept = len(self._text)
        for end in self._ends:
            longest = min(len(end) - 1, len(self._text))
            begun = next((n for n in range(longest, 0, -1) if self._text.endswith(end[:n])), 0)
            kept = min(kept, len(self._text) - begun)
        return kept
