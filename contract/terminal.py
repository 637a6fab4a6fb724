"""Text that others wrote, made safe to be shown: file names, prompts, ids, error messages, a model's answers.

A terminal obeys escape sequences: they move its cursor, write over what it showed, name its window, or answer into the
shell. Nothing of that is ever printed as it came. Knows no output stream.
"""

from __future__ import annotations

import json
import re

OBEYED = re.compile("[\x7f-\x9f\u2028\u2029]")
"""What JSON leaves as it is and terminals or readers of lines obey."""


def safe(text: str) -> str:
    """`text` in one line: control and invisible characters spelled out, as JSON spells them."""
    return text if text.isprintable() else "".join(map(_spelled, text))


def safe_lines(text: str) -> str:
    """The same, line feeds kept."""
    return "\n".join(map(safe, text.split("\n")))


def safe_json(document: str) -> str:
    """A JSON document with what its writer did not spell out: still JSON, and the same one."""
    return OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _spelled(char: str) -> str:
    if char.isprintable():
        return char
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]
