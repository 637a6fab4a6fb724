"""The one error hierarchy.

DllmError                  anything we raise on purpose; the command line prints it in one line
├── UsageError             the caller asked for something that cannot be (exit code 2)
│   ├── SettingsError      an unknown or impossible setting
│   └── ModelLoadError     a checkpoint that is missing, unknown or inconsistent
├── ServerError            Redis is not there, or must not be used as it is configured
├── StoreError             the object store for outputs takes or gives nothing now; an OSError too, as a full disk is
├── EndpointError          an HTTP endpoint that is to be measured is not there, or answers otherwise than it should
└── PromptError            one prompt cannot be answered; carries a stable code of `contract.jobs`
    ├── BadPrompt          the input is at fault: never retried
    └── PromptFailure      the model, the machine or the time is at fault: retried as `RETRIES` says for its code
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DllmError(Exception):
    """Base of all our errors. `str()` is one line: what is wrong, and what to do about it."""


class UsageError(DllmError):
    """The caller asked for something that cannot be."""


class SettingsError(UsageError):
    """A setting is unknown or out of range."""


class ModelLoadError(UsageError):
    """A checkpoint is missing, of an unknown family, or contradicts itself."""


class ServerError(DllmError):
    """The Redis server cannot be reached, started or safely used."""


class StoreError(DllmError, OSError):
    """The object store cannot be used now, or is not the one in which a batch has its rows."""


class EndpointError(DllmError):
    """An HTTP endpoint cannot be reached, or does not answer as OpenAI's API does."""


class PromptError(DllmError):
    """One prompt cannot be answered. `code` is one of `contract.jobs.ErrorCode`, `param` the name at fault if known."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class BadPrompt(PromptError):
    """The prompt or its parameters are at fault; trying again would change nothing."""


class PromptFailure(PromptError):
    """The prompt could have been answered, and was not; `contract.jobs.RETRIES` tells whether it is tried again."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
