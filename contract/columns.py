"""Which keys of a table's rows hold prompt, messages and id, and the template that makes a prompt of several.

A row of `.jsonl`, a line of `.csv` and a row of `.parquet` are alike here: keys and values. Whatever is neither one of
ours nor named here is the user's own, and travels to the output under `metadata`.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from contract.errors import BadPrompt

LONGEST_TEMPLATE = 1 << 16
PIECES = re.compile(r"\{\{|\}\}|\{([^{}\n]+)\}|[{}]")
PROMPTS = ("prompt", "messages", "prompt_token_ids")
IDS = ("id", "custom_id")


class Columns(BaseModel):
    """Where rows hold what, if not under our own names, and what stands between the values of a `.csv`.

    `template` is a text with `{column}` fields; the prompt is that text, filled in. `{{` and `}}` are braces.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str | None = None
    messages: str | None = None
    id: str | None = None
    delimiter: str = ","
    template: str | None = None

    @field_validator("template")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            pieces(text)
        return text

    @cached_property
    def ours(self) -> dict[str, str]:
        """Our key for each column that is named."""
        named = {"prompt": self.prompt, "messages": self.messages, "id": self.id}
        return {column: key for key, column in named.items() if column is not None}

    @cached_property
    def displaced(self) -> frozenset[str]:
        """Keys of ours that mean nothing here, because another column was named in their place."""
        prompts = PROMPTS if self.prompt or self.messages or self.template is not None else ()
        return frozenset([*prompts, *(IDS if self.id else ())])

    @cached_property
    def needed(self) -> tuple[str, ...]:
        """Columns without which no row has a prompt, in the order in which they were named."""
        named = [self.prompt, self.messages, self.id, *self.fields]
        return tuple(dict.fromkeys(column for column in named if column is not None))

    @property
    def names_the_prompt(self) -> bool:
        return bool(self.prompt or self.messages or self.template is not None)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The columns that the template takes."""
        return tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))

    @cached_property
    def _pieces(self) -> list[tuple[str, str | None]]:
        return [] if self.template is None else pieces(self.template)

    def fill(self, row: dict[str, Any]) -> str:
        """The template with the row's values in it. Raises BadPrompt('bad_row') naming the field that is missing."""
        return "".join(text if name is None else text + _shown(row, name) for text, name in self._pieces)


def pieces(template: str) -> list[tuple[str, str | None]]:
    """`template` as texts, each with the name of the field that follows it. Raises ValueError on a single brace."""
    if len(template.encode("utf-8", "replace")) > LONGEST_TEMPLATE:
        raise ValueError(f"a template may have {LONGEST_TEMPLATE:,} bytes")
    found: list[tuple[str, str | None]] = []
    text, end = "", 0
    for match in PIECES.finditer(template):
        text += template[end : match.start()]
        end = match.end()
        if match[1] is not None:
            found.append((text, match[1].strip()))
            text = ""
        elif len(match[0]) == 2:
            text += match[0][0]
        else:
            line = template.count("\n", 0, match.start()) + 1
            raise ValueError(f"a single '{match[0]}' on line {line}: write '{match[0] * 2}' for a brace")
    return [*found, (text + template[end:], None)]


def _shown(row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        raise BadPrompt("bad_row", f"the template's field '{name}' is missing")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
