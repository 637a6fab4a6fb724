"""What a file's name says about it: the kind of its content, its stem, and where parameters for it alone would lie.

`{stem}.params.yaml` beside a source, and a first line `# params: {…}` of a `.txt`, are sampling parameters of that
file: they beat those of the command and the configuration, and the rows' own beat them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from contract.errors import BadPrompt, UsageError
from contract.ledger import Kind
from contract.lines import BOM, TORN_GZIP, unpacked
from contract.sampling import SamplingParams, parse_params

KINDS: dict[str, Kind] = {".txt": "txt", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
PACKED = ".gz"
ENDINGS = (*KINDS, *(f"{end}{PACKED}" for end in KINDS if end != ".parquet"))
SHOWN = f"{', '.join(list(KINDS)[:-1])} and {list(KINDS)[-1]}"
PARAMS = ".params.yaml"
LONGEST_PARAMS = 1 << 16
PARAMS_LINE = re.compile(rb"#\s*params:(.*)", re.DOTALL)


class FileKind(NamedTuple):
    """What a name says: `stem` is it without its ending, `packed` that it is a `.gz`."""

    stem: str
    kind: Kind
    packed: bool


def of(name: str) -> FileKind | None:
    """None for a name that is not one of a file of prompts."""
    ending = next((end for end in ENDINGS if name.lower().endswith(end)), None)
    if ending is None:
        return None
    return FileKind(name[: -len(ending)], KINDS[ending.removesuffix(PACKED)], ending.endswith(PACKED))


def is_params(name: str) -> bool:
    """Is it a file of parameters for the source beside it?"""
    return name.endswith(PARAMS)


def params_beside(file: Path) -> Path:
    """Where parameters for `file` alone lie, if there are any."""
    found = of(file.name)
    return file.with_name(f"{found.stem if found else file.stem}{PARAMS}")


def own_params(file: Path, base: SamplingParams) -> tuple[SamplingParams, bool]:
    """What `file` says about parameters, laid over `base`, and whether its first line tells some.

    Raises UsageError naming the place and what would be right.
    """
    beside, found = params_beside(file), of(file.name)
    if beside.is_file():
        base = _laid_over(base, _read(beside), str(beside))
    line = _first_line(file, found.packed) if found and found.kind == "txt" else b""
    match = PARAMS_LINE.match(line)
    if match is None:
        return base, False
    return _laid_over(base, match[1], f"{file} line 1"), True


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(LONGEST_PARAMS + 1)


def _first_line(file: Path, packed: bool) -> bytes:
    with file.open("rb") as stream:
        try:
            line = (unpacked(stream) if packed else stream).readline(LONGEST_PARAMS + 1)
        except TORN_GZIP:
            return b""  # told when it is read for its prompts
    return line.removeprefix(BOM)


def _laid_over(base: SamplingParams, text: bytes, place: str) -> SamplingParams:
    if len(text) > LONGEST_PARAMS:
        raise UsageError(f"{place}: parameters may have {LONGEST_PARAMS:,} bytes")
    try:
        values: Any = yaml.safe_load(text.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values or {}, dict):
        raise UsageError(f"{place}: expected parameters by name, such as temperature: 0.7")
    try:
        return parse_params({str(name): value for name, value in (values or {}).items()}, base)
    except BadPrompt as error:
        raise UsageError(f"{place}: {error}") from None
