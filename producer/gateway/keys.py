"""API keys: who may ask. Only their hashes are kept; a key itself is shown once, when it is made.

A key is 32 random bytes, so its SHA-256 tells nothing about it and needs no salt. A name may have several keys, so that
one can be replaced while the other still serves. The file is written by rename, for readers that look at any moment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.errors import SettingsError, UsageError
from contract.paths import publish
from contract.settings import ProducerSettings

FILE_NAME = "keys.json"
START = "dllm-"
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
ENVIRONMENT = "environment"
"""The name of the key that stands in the setting."""


class Key(BaseModel):
    """A key's hash, whose it is, and limits of its own where it has any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    hash: str
    created_at: float
    requests_per_minute: int | None = Field(None, ge=0)
    concurrent: int | None = Field(None, ge=0)


class KeyFile(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Keys:
    """The keys at one moment."""

    known: Sequence[Key]

    def find(self, given: str) -> Key | None:
        """The key that was given, in a time that does not depend on how much of it is right."""
        hashed, found = digest(given), None
        for key in self.known:
            if hmac.compare_digest(key.hash, hashed):
                found = key
        return found


def place(settings: ProducerSettings) -> Path:
    return settings.serve_keys or settings.folders.configs / FILE_NAME


def load(settings: ProducerSettings) -> Keys:
    """The keys of the file and of the setting. Raises SettingsError for a file that cannot be read."""
    own = settings.serve_api_key.get_secret_value() if settings.serve_api_key else ""
    from_setting = [Key(name=ENVIRONMENT, hash=digest(own), created_at=0.0)] if own else []
    return Keys([*from_setting, *read(place(settings)).keys])


def read(file: Path) -> KeyFile:
    try:
        return KeyFile.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return KeyFile()
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{file}: the keys cannot be read: {' '.join(str(error).split())}") from None


def make(file: Path, name: str, requests_per_minute: int | None, concurrent: int | None, replace: bool = False) -> str:
    """A new key for `name`, instead of its others with `replace`; returns the key, which nobody can tell again."""
    if not NAME.fullmatch(name) or name == ENVIRONMENT:
        raise UsageError(f"'{name}' cannot be a key's name: use up to 64 of A-Z a-z 0-9 _ . @ -")
    key = START + secrets.token_urlsafe(32)
    made = Key(
        name=name,
        hash=digest(key),
        created_at=time.time(),
        requests_per_minute=requests_per_minute,
        concurrent=concurrent,
    )
    with _locked(file):
        kept = [one for one in read(file).keys if not (replace and one.name == name)]
        _write(file, [*kept, made])
    return key


def revoke(file: Path, name: str) -> int:
    """End all keys of `name`; returns how many there were."""
    with _locked(file):
        known = read(file).keys
        kept = [one for one in known if one.name != name]
        if len(kept) < len(known):
            _write(file, kept)
    return len(known) - len(kept)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _write(file: Path, keys: Sequence[Key]) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    document = KeyFile(keys=tuple(keys)).model_dump(mode="json", exclude_none=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(json.dumps(document, indent=2) + "\n")
    publish(partial, file)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
