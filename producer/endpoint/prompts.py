"""What is sent: the prompts of a measurement, from flags, a file, or the few that stand here.

A row of a file keeps its own parameters and its own limit of new tokens, so that a set of mixed lengths stays one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from contract import rows
from contract.errors import BadPrompt, UsageError
from contract.jobs import ErrorCode, Message
from contract.jobs import Prompt as Content
from contract.ledger import Cursor
from contract.lines import Line, lines

MOST = 10_000
"""Prompts read from a file: more than that many are no better a sample."""
LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
FIXED = ("model", "messages", "prompt", "prompt_token_ids", "stream", "stream_options", "n", *LIMITS)
"""Fields of a request that flags and prompts decide; no parameter may set them."""

BUILT_IN = (
    "Name three primary colours.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five things to check before a long journey by bicycle, one per line.",
    "What is the difference between a queue and a stack? Give an example of each from daily life.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show your steps.",
    "Write a Python function that returns the longest word of a text, and explain how it works.",
    "Summarise in one paragraph: Bees find flowers by colour, scent and memory. A scout that has found a rich field "
    "flies home and dances on the comb; the angle of her dance tells the direction, its length the distance. Others "
    "follow her steps in the dark, then fly out, and most of them arrive. Whoever comes back full dances too, so the "
    "best fields gather the most dancers, and a field that is empty is soon forgotten.",
)


@dataclass(frozen=True)
class Prompt:
    """One request's own part: content, parameters as they are sent, and its limit of new tokens if it has one."""

    content: Content
    params: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    @property
    def conversation(self) -> bool:
        return not isinstance(self.content, str) and isinstance(self.content[0], Message)

    @property
    def plain(self) -> str | list[Any]:
        """The content as JSON has it."""
        if isinstance(self.content, str):
            return self.content
        return [one.model_dump() if isinstance(one, Message) else one for one in self.content]

    @property
    def characters(self) -> int | None:
        """Characters of text; None for token ids."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(one.content) for one in self.content if isinstance(one, Message)) or None


@dataclass(frozen=True)
class PromptSet:
    """The prompts, where they come from, and whether a file had more."""

    prompts: tuple[Prompt, ...]
    source: str
    cut: bool = False

    def spread(self, count: int) -> list[Prompt]:
        """`count` prompts for one round: at even distances over the set, or a shorter set again and again."""
        have = len(self.prompts)
        if count < have:
            return [self.prompts[number * have // count] for number in range(count)]
        return [self.prompts[number % have] for number in range(count)]

    def facts(self) -> dict[str, Any]:
        """Enough to tell whether two reports sent the same. Characters: the least, the median and the most."""
        sent = [[one.plain, one.params, one.max_tokens] for one in self.prompts]
        lengths = sorted(one.characters for one in self.prompts if one.characters is not None)
        return {
            "source": self.source,
            "count": len(self.prompts),
            "sha256": hashlib.sha256(json.dumps(sent, sort_keys=True).encode()).hexdigest(),
            "characters": [lengths[0], lengths[len(lengths) // 2], lengths[-1]] if lengths else None,
        }


def choose(texts: Sequence[str], file: Path | None, limit: int) -> PromptSet:
    """The prompts that `--prompt` and `--prompts` ask for; without either the built-in ones.

    `limit` is the longest line in bytes. Raises UsageError.
    """
    if texts and file:
        raise UsageError("--prompt and --prompts exclude each other: put the prompts into the file")
    if file:
        return _from_file(file, limit)
    for text in texts:
        if not text.strip():
            raise UsageError("--prompt is empty: give it text")
    return PromptSet(tuple(map(Prompt, texts or BUILT_IN)), "--prompt" if texts else "built-in")


def check_api(found: PromptSet, api: str) -> None:
    """Refuse prompts that the API has no place for. Raises UsageError naming the first."""
    for number, prompt in enumerate(found.prompts, start=1):
        if prompt.conversation and api == "completions":
            raise UsageError(f"prompt {number} of {found.source} is a conversation: use --api chat")
        if not prompt.conversation and not isinstance(prompt.content, str) and api == "chat":
            raise UsageError(f"prompt {number} of {found.source} is token ids: use --api completions")


def _from_file(file: Path, limit: int) -> PromptSet:
    read = {".txt": _text_line, ".jsonl": _json_line}.get(file.suffix.lower())
    if read is None:
        raise UsageError(f"--prompts {file}: unknown kind of file; .txt (a prompt a line) and .jsonl can be read")
    try:
        with file.open("rb") as stream:
            found = list(islice(_prompts(lines(stream, Cursor(), limit, lambda: None), file, read), MOST + 1))
    except OSError as error:
        raise UsageError(f"--prompts {file}: {error.strerror}") from None
    if not found:
        raise UsageError(f"--prompts {file}: no prompt in it")
    return PromptSet(tuple(found[:MOST]), file.name, cut=len(found) > MOST)


def _prompts(found: Iterable[Line], file: Path, read: Callable[[Line], Prompt]) -> Iterator[Prompt]:
    for line in found:
        try:
            if line.raw.strip():
                yield read(line)
        except BadPrompt as error:
            raise UsageError(f"--prompts {file}, line {line.number}: {error}") from None


def _text_line(line: Line) -> Prompt:
    return Prompt(rows.text(line.raw, line.offset))


def _json_line(line: Line) -> Prompt:
    row = rows.arrange(rows.decode(line.raw, line.offset))
    rows.refuse_mistaken(row)
    body = rows.body(row)
    params = rows.parameters(body)
    limits = [params.pop(name) for name in LIMITS if name in params]
    for limit in limits:
        if type(limit) is not int or limit < 1:
            raise BadPrompt(ErrorCode.BAD_PARAMS, f"the limit of new tokens must be a whole number, not {limit!r}")
    return Prompt(rows.prompt(body), params, limits[0] if limits else None)
