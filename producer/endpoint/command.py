"""What `producer bench-endpoint` does with its flags: open the endpoint, load it, report.

Wrong flags are refused before anything is sent, and files that cannot be written before anything is measured.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import yaml

from contract.errors import UsageError
from contract.settings import ProducerSettings
from contract.terminal import safe
from producer import display
from producer.endpoint import plot
from producer.endpoint.client import Api, Dialect, Target, connected
from producer.endpoint.conditions import answered_as, conditions, without_secrets
from producer.endpoint.load import Plan, Round, measure
from producer.endpoint.markdown import markdown
from producer.endpoint.opening import Opened, open_endpoint
from producer.endpoint.prompts import FIXED, MOST, PromptSet, check_api, choose
from producer.endpoint.report import Report, facts, lines, report, sheets
from producer.endpoint.statistics import Prices

MOST_CLIENTS = 1_000
"""At a time: each is a connection, and processes have about as many files."""
MOST_CALLS = 100_000
FALLBACK_KEY = "OPENAI_API_KEY"
STDOUT = Path("-")


@dataclass(frozen=True)
class Task:
    """The flags of `producer bench-endpoint` that are not settings."""

    base_url: str
    model: str | None = None
    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    api: str = "chat"
    stream: bool = True
    max_tokens: int | None = None
    params: tuple[str, ...] = ()
    rounds: int = 5
    concurrency: str = "1,4,16"
    calls: int | None = None
    warmup: int = 1
    timeout_s: float = 120.0
    json_file: Path | None = None
    markdown_file: Path | None = None
    plot_file: Path | None = None


@dataclass(frozen=True)
class Key:
    """The key that is sent, and where it comes from."""

    value: str | None
    source: str | None


def bench(task: Task, settings: ProducerSettings, key: Key) -> Report:
    """Measure and deliver. Raises UsageError for flags that cannot be, EndpointError where nothing can be measured."""
    plan = Plan(_levels(task.concurrency), task.rounds, task.calls, task.warmup)
    if plan.total > MOST_CALLS:
        raise UsageError(f"these are {plan.total:,} calls, and {MOST_CALLS:,} the most: lower --rounds or --calls")
    prompts = choose(task.prompts, task.prompts_file, settings.max_line_mb << 20)
    target = _target(task)
    check_api(prompts, target.api)
    _check_files(task)
    found = asyncio.run(_measured(target, plan, prompts, _prices(settings), key))
    _deliver(found, task)
    return found


def api_key(flag: str | None, settings: ProducerSettings, environment: Mapping[str, str]) -> Key:
    """`--api-key`, else the setting `api_key`, else OPENAI_API_KEY. Raises UsageError for what no header can hold."""
    stored = settings.api_key.get_secret_value() if settings.api_key else None
    places = {"--api-key": flag, "setting api_key": stored, FALLBACK_KEY: environment.get(FALLBACK_KEY)}
    for source, value in places.items():
        if value and (not (value.isascii() and value.isprintable()) or " " in value):
            raise UsageError(f"the API key from {source} has characters that no key has: was it copied whole?")
        if value:
            return Key(value, source)
    return Key(None, None)


async def _measured(target: Target, plan: Plan, prompts: PromptSet, prices: Prices, key: Key) -> Report:
    """Ctrl-C and SIGTERM end the measuring and not the report; a second one ends the process."""
    rounds: list[Round] = []
    async with connected(key.value, max(plan.levels)) as clients:
        opened = await open_endpoint(clients[0], target, prompts.prompts[0])
        _announce(opened, plan, key)
        facts = conditions(opened, plan, prompts, key.source)
        loading = asyncio.create_task(measure(clients, opened.target, plan, prompts, rounds, _say_round))
        _cancel_on_signals(loading)
        try:
            stopped = await loading
            interrupted = False
        except asyncio.CancelledError:
            stopped, interrupted = None, True
    notes = [*opened.notes, *([f"only the first {MOST:,} prompts of the file were used"] if prompts.cut else [])]
    notes += [stopped] if stopped else []
    return report(rounds, prices, facts | {"answered_as": answered_as(rounds)}, notes, interrupted)


def _cancel_on_signals(loading: asyncio.Task[Any]) -> None:
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        loading.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel)


def _announce(opened: Opened, plan: Plan, key: Key) -> None:
    target = opened.target
    sent = f", with the key from {key.source}" if key.source else ""
    display.say(f"{target.model} at {without_secrets(target.base_url)}{sent}: {plan.total:,} calls at most")


def _say_round(done: Round) -> None:
    tokens = [call.output_tokens for call in done.answered]
    known = [one for one in tokens if one is not None]
    rate = f"{sum(known) / done.seconds:.1f} tokens/s" if len(known) == len(tokens) and known else "no usage"
    failed = len(done.calls) - len(done.answered)
    told = f"{rate}, {len(done.calls)} calls in {done.seconds:.1f} s{f', {failed} failed' if failed else ''}"
    display.say(f"concurrency {done.level}  round {done.number}: {told}")


def _deliver(found: Report, task: Task) -> None:
    if task.json_file == STDOUT:
        display.answer(found.model_dump_json(indent=2))
    else:
        _show(found)
    if task.json_file and task.json_file != STDOUT:
        task.json_file.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if task.markdown_file:
        task.markdown_file.write_text(markdown(found), encoding="utf-8")
    if task.plot_file:
        plot.draw(found, task.plot_file)
    for file in (task.json_file, task.markdown_file, task.plot_file):
        if file and file != STDOUT:
            display.say(f"written: {file}")


def _show(found: Report) -> None:
    for sheet in sheets(found):
        display.answer(sheet.title)
        display.table(sheet.columns, [[safe(cell) for cell in row] for row in sheet.rows])
        display.answer("")
    display.answer("Conditions")
    display.table(("CONDITION", "VALUE"), [(name, safe(value)) for name, value in facts(found.conditions)])
    display.answer("")
    for line in lines(found):
        display.answer(safe(line))


def _target(task: Task) -> Target:
    if task.api not in get_args(Api):
        raise UsageError(f"--api must be {' or '.join(get_args(Api))}, not '{task.api}'")
    return Target(
        base_url=_base_url(task.base_url),
        model=task.model or "",
        api=task.api,  # type: ignore[arg-type]
        stream=task.stream,
        max_tokens=task.max_tokens,
        timeout_s=task.timeout_s,
        params=_params(task.params),
        dialect=Dialect(include_usage=task.stream),
    )


def _base_url(given: str) -> str:
    """Without a slash at its end. Raises UsageError with the address that was probably meant."""
    try:
        parts = urlsplit(given.strip())
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError as error:
        raise UsageError(f"--base-url {given}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--base-url {given}: give the whole address, such as http://127.0.0.1:8000/v1")
    if parts.query or parts.fragment:
        raise UsageError("--base-url must end with its path: no '?' and no '#'")
    base = parts.geturl().rstrip("/")
    for ending in ("/chat/completions", "/completions", "/models"):
        if base.endswith(ending):
            raise UsageError(f"--base-url {without_secrets(base)}: leave '{ending}' away")
    return base


def _levels(text: str) -> tuple[int, ...]:
    """`1,4,16` as numbers, rising, each once."""
    try:
        levels = sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise UsageError(
            f"--concurrency takes numbers with commas between them, such as 1,4,16, not '{text}'"
        ) from None
    if not 1 <= levels[0] <= levels[-1] <= MOST_CLIENTS:
        raise UsageError(f"--concurrency {text}: each must be from 1 to {MOST_CLIENTS}")
    return tuple(levels)


def _params(given: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--param takes NAME=VALUE, such as --param temperature=0, not '{word}'")
        if name in FIXED:
            raise UsageError(f"--param {name}: a flag or the prompts decide that")
        try:
            found[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise UsageError(f"--param {name}: not readable as YAML: '{value}'") from None
    return found


def _check_files(task: Task) -> None:
    if task.plot_file:
        plot.require()
    for flag, file in (("--json", task.json_file), ("--markdown", task.markdown_file), ("--plot", task.plot_file)):
        if file is None or (file == STDOUT and flag == "--json"):
            continue
        if file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UsageError(f"{flag} {file}: cannot be written there")


def _prices(settings: ProducerSettings) -> Prices:
    return Prices(settings.price_per_hour, settings.price_per_million_input, settings.price_per_million_output)
