"""Configuration files that explain themselves: every setting with what it means and its default, commented out.

`configs/producer.yaml` and `configs/worker.yaml` of this repository are what comes out here; a test holds that.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings, Settings, WorkerSettings

WIDTH = 118
KINDS: tuple[type[Settings], ...] = (ProducerSettings, WorkerSettings)
HEAD = """\
# Settings of `{command}`, with their defaults. Take away a `#` to change one.
# A flag beats the environment (DLLM_ and the name in capitals), the environment beats this file.
"""
PARAMS = ("max_new_tokens", "temperature", "top_p", "top_k")
"""Sampling parameters shown as an example."""


def write(folders: Folders, force: bool) -> dict[Path, bool]:
    """Write the files that are not there yet, with `force` all of them; tells of each whether it was written."""
    folders.configs.mkdir(parents=True, exist_ok=True)
    files = {folders.configs / kind.file_name: kind for kind in KINDS}
    written = {file: force or not file.exists() for file in files}
    for file, kind in files.items():
        if written[file]:
            file.write_text(commented(kind), encoding="utf-8")
    return written


def commented(kind: type[Settings]) -> str:
    """The configuration file of `kind`; `root` is where it stands, and no setting of it."""
    parts = [HEAD.format(command=Path(kind.file_name).stem)]
    for name, field in kind.model_fields.items():
        if name == "root":
            continue
        told = textwrap.wrap(_told(field), WIDTH, break_on_hyphens=False, break_long_words=False)
        parts.append("".join(f"# {line}\n" for line in [*told, *_value(name, field.default)]))
    return "\n".join(parts)


def _told(field: FieldInfo) -> str:
    """The description as a sentence, with the values to choose from where it does not name them."""
    words = str(field.description)
    sentence = words[0].upper() + words[1:] if words.split()[0].isalpha() else words
    choices = [str(one) for one in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    missing = any(one not in words for one in choices)
    return f"{sentence} ({', '.join(choices)})." if missing else f"{sentence}."


def _value(name: str, default: object) -> list[str]:
    if not isinstance(default, SamplingParams):
        return [yaml.safe_dump({name: default}).strip()]
    return [f"{name}:", *(f"  {one}: {getattr(default, one)}" for one in PARAMS)]
