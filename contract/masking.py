"""Secrets are taken out of every line before anybody sees it: logs, terminal, audit.

By value, where they are known from the environment, and by form, where they are not: credentials in an address,
whatever follows the name of a secret, tokens that look like tokens. Masking too much is the lesser evil.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote, urlsplit

HIDDEN = "***"
SHORTEST = 6
"""A shorter value is no secret worth the name, and might be part of many words."""

NAMES = re.compile(r"KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL", re.IGNORECASE)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>\\]*@")
_NAMED = re.compile(
    r"((?:password|passwd|secret|credentials?|api[_-]?keys?|access[_-]?key|authorization|(?<![A-Za-z])token)"
    r"\\?[\"']?\s*[=:]\s*\\?[\"']?)(?:(?:bearer|basic)\s+)?[^\s\"'\\&,;}]+",
    re.IGNORECASE,
)
_FORMS = re.compile(r"\bBearer\s+[\w.~+/=-]{8,}|\bsk-[\w-]{12,}|\bhf_\w{16,}", re.IGNORECASE)


class Mask:
    """`text` without secrets; `values` are those that are known word by word."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        known = {form for value in values if len(value) >= SHORTEST for form in (value, json.dumps(value)[1:-1])}
        longest_first = sorted(known, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first))) if known else None

    def __call__(self, text: str) -> str:
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        if "@" in text:
            text = _ADDRESS.sub(rf"\g<1>{HIDDEN}@", text)
        return _FORMS.sub(HIDDEN, _NAMED.sub(rf"\g<1>{HIDDEN}", text))


def secrets_of(address: str) -> list[str]:
    """The passwords in a server's address, as they are written there and as they are meant."""
    parts = urlsplit(address)
    found = [parts.password or "", *re.findall(r"password=([^&#]+)", parts.query)]
    return [form for secret in found for form in (secret, unquote(secret)) if form]


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """The values of variables whose names say that they are secret; several in one are parted by commas or spaces."""
    found = [value for name, value in environment.items() if NAMES.search(name)]
    return [*found, *(part for value in found for part in re.split(r"[\s,]+", value))]
