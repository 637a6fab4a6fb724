"""What may not go in or come out: a plug-in point, and a list of words.

A filter of your own is anything with the methods of `Filter`, made by calling what `serve_filters` names with the
settings. It says why a text is refused, or None. It is called in the event loop: what takes time belongs into
`asyncio.to_thread`. Outputs of streams are shown to it again and again as they grow, up to the last whole word, and
nothing is sent that it has not seen.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from contract.errors import SettingsError
from contract.settings import ProducerSettings


class Filter(Protocol):
    """Judges texts. `caller` is the name of the key that asks."""

    async def prompt(self, text: str, caller: str) -> str | None:
        """Why this prompt is refused; None when it may pass."""

    async def output(self, text: str, caller: str) -> str | None:
        """Why this output is withheld; None when it may pass."""


class Words:
    """Refuses texts that hold a word or phrase of a list, whatever its case, accents' spelling, or white space."""

    def __init__(self, words: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(_as_pattern(word) for word in words)) if words else None

    async def prompt(self, text: str, caller: str) -> str | None:
        return self._found(text)

    async def output(self, text: str, caller: str) -> str | None:
        return self._found(text)

    def _found(self, text: str) -> str | None:
        held = self._pattern.search(_folded(text)) if self._pattern else None
        return "it holds a word that is not allowed here" if held else None


@dataclass(frozen=True)
class Filters:
    """All of them; the first that refuses has its way."""

    known: Sequence[Filter]

    async def prompt(self, text: str, caller: str) -> str | None:
        for one in self.known:
            if why := await one.prompt(text, caller):
                return why
        return None

    async def output(self, text: str, caller: str) -> str | None:
        for one in self.known:
            if why := await one.output(text, caller):
                return why
        return None


def load(settings: ProducerSettings) -> Filters:
    """The filters that the settings name. Raises SettingsError for what cannot be read or found."""
    named = [name.strip() for name in (settings.serve_filters or "").split(",") if name.strip()]
    found: list[Filter] = [Words(_read(settings))] if settings.serve_filter_words else []
    return Filters([*found, *(_made(name, settings) for name in named)])


def whole_words(text: str) -> str:
    """`text` without a word at its end that may not be over yet.

    Scripts without capitals, which write without spaces too, have their text judged as it comes.
    """
    end = len(text)
    while end and (text[end - 1].isdigit() or text[end - 1] == "_" or text[end - 1].lower() != text[end - 1].upper()):
        end -= 1
    return text[:end]


def _read(settings: ProducerSettings) -> list[str]:
    file = settings.serve_filter_words
    assert file is not None
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"serve_filter_words: {file} cannot be read: {error}") from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _made(name: str, settings: ProducerSettings) -> Filter:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"serve_filters: '{name}' is not of the form package.module:name")
    try:
        return cast(Filter, getattr(importlib.import_module(module), attribute)(settings))
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"serve_filters: '{name}' is not there: {error}") from None


def _as_pattern(word: str) -> str:
    """A whole word where a script has such: `ass` is not held by `class`."""
    spaced = r"\s+".join(re.escape(part) for part in _folded(word).split())
    before, after = (r"(?<!\w)" if _in_words(word[0]) else ""), (r"(?!\w)" if _in_words(word[-1]) else "")
    return f"{before}{spaced}{after}"


def _in_words(char: str) -> bool:
    return char.isdigit() or char.lower() != char.upper()


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
