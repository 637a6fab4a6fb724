"""Options that `producer` and `worker` have in common, each declared once, and what a shell completes in them.

The only module here that knows the command line's library; only the two commands may import it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.settings import PREFIX, Settings

Command = Callable[..., None]


def among(values: Iterable[str]) -> Callable[[str], list[str]]:
    """What completes an option that takes one of `values`."""
    known = list(values)

    def complete(incomplete: str) -> list[str]:
        return [value for value in known if value.startswith(incomplete)]

    return complete


def choices(settings: type[Settings], name: str) -> Callable[[str], list[str]]:
    """What completes the option for a setting that is one of a few words."""
    return among(get_args(settings.model_fields[name].annotation))


def _root(context: typer.Context) -> Path:
    """The root that a command line says which is not at its end yet."""
    return Path(context.params.get("root") or os.environ.get(f"{PREFIX}ROOT") or ".")


def models(context: typer.Context, incomplete: str) -> list[str]:
    """The models that lie under `models/`."""
    found = sorted(file.parent.name for file in Folders(_root(context)).models.glob("*/config.json"))
    return [name for name in found if name.startswith(incomplete)]


Root = Annotated[Path | None, typer.Option("--root", help="Folder under which all others lie [DLLM_ROOT, else .]")]
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="Redis address [DLLM_REDIS_URL, else a local server is started]")
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Name under models/, path of a checkpoint, or org/name", autocompletion=models),
]


def sampling_flags(*without: str) -> Callable[[Command], Command]:
    """Give a command an option for every sampling parameter but those `without`.

    They stand where its keyword parameter `sampling` stands, which gets the values that were given, by name.
    """

    def declare(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        fields = SamplingParams.model_fields.items()
        options = {name: _option(name, field) for name, field in fields if name not in without}

        @functools.wraps(command)
        def called(**given: Any) -> None:
            sampling = {name: value for name in options if (value := given.pop(name)) is not None}
            command(sampling=sampling, **given)

        found: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            found += options.values() if name == "sampling" else [parameter]
        called.__signature__ = signature.replace(parameters=found)  # type: ignore[attr-defined]
        return called

    return declare


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option of a field; what is wrong about a value is said by `parse_params`."""
    kind = next(one for one in get_args(field.annotation) or (field.annotation,) if one is not NoneType)
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    words = get_args(kind) if get_origin(kind) is Literal else ()
    told = str(field.description)
    told = told[0].upper() + told[1:] + ("" if all(word in told for word in words) else f": {', '.join(words)}")
    flag = typer.Option(f"--{name.replace('_', '-')}", help=told, autocompletion=among(words) if words else None)
    annotation: Any = Annotated[(str if words else kind) | None, flag]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
