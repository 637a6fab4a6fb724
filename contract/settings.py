"""One way to set a value: flag > environment > file > default.

Files are `configs/producer.yaml` and `configs/worker.yaml`; the environment name of a setting is `DLLM_` plus its
name in capitals. Unknown names are refused with the nearest known one, so that a typing mistake never passes silently.
Settings are frozen once read.
"""

from __future__ import annotations

import json
import os
import time
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from contract import hours, names, protocols
from contract.errors import BadPrompt, SettingsError, nearest
from contract.jobs import OutputFormat
from contract.paths import Folders
from contract.sampling import SamplingParams, parse_params

PREFIX = "DLLM_"
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Price = Annotated[float, Field(ge=0)] | None


class Settings(BaseSettings):
    """What producer and worker share."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)
    file_name: ClassVar[str] = ""

    root: Path = Field(Path("."), description="the folder under which all others lie")
    redis_url: str | None = Field(
        None,
        repr=False,  # it may hold a password
        description="redis://, rediss://, unix:// or sentinel:// address; without it a local server is started",
    )
    key_prefix: Annotated[str, Field(pattern=names.PATTERN)] = Field(
        names.DEFAULT, description="first word of our keys and queues: installations that differ in it share a server"
    )
    outputs_url: str | None = Field(
        None,
        repr=False,
        description="s3://BUCKET/PREFIX, gs://… and the like: an object store for outputs, in place of batch_outputs/",
    )
    model: str = Field(
        "demo", description="a name under models/, the path of a checkpoint folder, or org/name on the hub"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")
    log_prompts: bool = Field(False, description="write prompts and outputs into the logs too")
    keep_segments_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="a published batch's rows stay in .segments/ for so long: as old as a backup of Redis may be",
    )
    log_max_mb: Count = Field(64, description="a log file is rotated at this size")
    log_max_hours: Seconds = Field(24.0, description="a log file is rotated at this age, in hours")
    log_keep_days: Seconds = Field(30.0, description="log files that were not written to for so long are removed")
    log_keep_mb: Count = Field(2048, description="the oldest log files are removed while all take more")
    audit_keep_days: Seconds = Field(
        365.0, description="files of logs/audit.jsonl that were not written to for so long are removed"
    )
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None,
        description="/metrics, /healthz and /readyz of `worker run` and `producer watch` are served there; none: off",
    )
    metrics_host: str = Field(
        "127.0.0.1", description="address they are served at; 0.0.0.0 lets other machines see them"
    )

    @field_validator("outputs_url")
    @classmethod
    def _store(cls, value: str | None) -> str | None:
        return value if value is None else protocols.checked(value)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes in (flags over file values, see `read`) and the environment."""
        return (init_settings, env_settings)

    @property
    def folders(self) -> Folders:
        return Folders(self.root.resolve(), self.outputs_url)

    @property
    def queue_model(self) -> str:
        """The model's name in queue names and output rows: the last part of its path."""
        return Path(self.model).name


class ProducerSettings(Settings):
    """Settings of `producer`, from `configs/producer.yaml`."""

    file_name: ClassVar[str] = "producer.yaml"

    priority: Literal["high", "normal", "low"] = Field("normal", description="queue that a batch goes to")
    not_before: str | None = Field(
        None, description="a batch runs from then on: 22:00 (the next one), 2026-12-03T22:00 or +2h30m, local time"
    )
    window: str | None = Field(None, description="a batch runs only at these hours of the day, such as 22:00-06:00")
    params: Annotated[SamplingParams, NoDecode] = Field(
        SamplingParams(), description="sampling parameters for rows that do not set them; in the environment as JSON"
    )
    txt_mode: Literal["lines", "file"] = Field(
        "lines", description=".txt input: one prompt a line, or the whole file as one prompt"
    )
    output_format: OutputFormat = Field(
        "jsonl", description="what is published beside the JSON lines: jsonl (nothing), csv, parquet or openai"
    )
    price_per_hour: Price = Field(None, description="price of an hour of one worker, for the estimated cost of a batch")
    price_per_million_input: Price = Field(None, description="price of a million prompt tokens, for the same")
    price_per_million_output: Price = Field(None, description="price of a million output tokens, for the same")
    prompt_column: str | None = Field(None, description="column or key that holds the prompt, if not `prompt`")
    messages_column: str | None = Field(None, description="column or key that holds the messages, if not `messages`")
    id_column: str | None = Field(None, description="column or key that holds the id, if not `id` or `custom_id`")
    csv_delimiter: str = Field(",", description="what stands between the values of a .csv; `tab` for a tab")
    template: Path | None = Field(None, description="file with the prompts' text, its `{column}` fields filled in")
    recursive: bool = Field(False, description="take folders below too; outputs and sources keep the folder's path")
    scan_s: Seconds = Field(2.0, description="seconds between scans of batch_inputs/")
    settle_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="seconds a file's size and mtime must stand still before it is claimed"
    )
    max_queued: Count = Field(10_000, description="prompts of one batch that stand in Redis at a time")
    max_queued_mb: Count = Field(64, description="the same in megabytes of prompt text")
    max_line_mb: Annotated[int, Field(ge=1, le=32)] = Field(16, description="a longer input line is an error row")
    serve_host: str = Field(
        "127.0.0.1", description="address that `producer serve` listens on; any but loopback needs an API key"
    )
    serve_port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="its port; 0: any that is free")
    serve_api_key: SecretStr | None = Field(
        None, description="an API key; set it in the environment, or make keys with `producer key NAME`"
    )
    serve_keys: Path | None = Field(None, description="file of the keys' hashes; without it configs/keys.json")
    serve_timeout_s: Seconds = Field(600.0, description="a request that has no answer by then ends with 504")
    serve_grace_s: Annotated[float, Field(ge=0)] = Field(
        20.0, description="seconds to finish answers under way after SIGTERM"
    )
    serve_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="share of the workers' rows that requests may take; more of them end with 429"
    )
    serve_requests_per_minute: int = Field(0, ge=0, description="requests a minute of a key; 0: no limit")
    serve_concurrent: int = Field(0, ge=0, description="requests of a key at a time; 0: no limit")
    serve_max_body_mb: Count = Field(8, description="largest request, uploads apart")
    serve_max_file_mb: Count = Field(512, description="largest upload")
    serve_stream_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="tokens a second at which streams are smoothed; 0: each block as it comes"
    )
    serve_dashboard: bool = Field(False, description="`producer serve` shows the page too, at /dashboard")
    serve_filter_words: Path | None = Field(
        None, description="file of words and phrases, one a line, that neither prompts nor outputs may hold"
    )
    serve_filters: str | None = Field(
        None, description="filters of your own, as package.module:name, several with commas"
    )
    dashboard_host: str = Field(
        "127.0.0.1", description="address that `producer dashboard` listens on; any but loopback needs an API key"
    )
    dashboard_port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="its port; 0: any that is free")
    dashboard_actions: bool = Field(False, description="failed rows can be queued again from the page")
    api_key: SecretStr | None = Field(
        None, description="key that `producer bench-endpoint` sends; without it OPENAI_API_KEY of the environment"
    )

    @field_validator("not_before", mode="before")
    @classmethod
    def _moment(cls, value: Any) -> Any:
        """YAML takes an unquoted 22:00 for a number of sixties, and dates for dates."""
        if type(value) is int and 0 <= value < 24 * 60:
            value = f"{value // 60}:{value % 60:02}"
        text = value.isoformat() if isinstance(value, date) else value
        if text is not None:
            hours.moment(str(text), time.time())
        return text

    @field_validator("window", mode="before")
    @classmethod
    def _window(cls, value: Any) -> Any:
        if value is not None:
            hours.clock_window(str(value))
        return value

    @field_validator("csv_delimiter", mode="before")
    @classmethod
    def _delimiter(cls, value: Any) -> Any:
        value = "\t" if value == "tab" else value
        if not isinstance(value, str) or len(value) != 1 or value in '"\r\n':
            raise ValueError("give one character, or tab")
        return value

    @field_validator("messages_column")
    @classmethod
    def _one_prompt(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("prompt_column") is not None:
            raise ValueError("a row has messages or a prompt: set messages_column or prompt_column, not both")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _as_in_a_row(cls, value: Any) -> Any:
        """The names, aliases and messages that a row's parameters have."""
        try:
            values = json.loads(value) if isinstance(value, str) else value
            return parse_params(values) if isinstance(values, dict) else values
        except json.JSONDecodeError as error:
            raise ValueError(f"not readable as JSON: {error}") from None
        except BadPrompt as error:
            raise ValueError(str(error)) from None


class WorkerSettings(Settings):
    """Settings of `worker`, from `configs/worker.yaml`."""

    file_name: ClassVar[str] = "worker.yaml"

    device: str = Field(
        "auto",
        description="auto, cpu, cuda or cuda:N; several with commas, or all: one process each; "
        "cuda:0+cuda:1: one model spread over both",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="arithmetic; auto: bfloat16 where the hardware multiplies it natively, else float32"
    )
    allow_pickle_weights: bool = Field(
        False, description="read .bin weights where there are no safetensors: only of a source that you trust"
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        "none", description="hold weights in 8 or 4 bits, by torchao: less memory, answers that differ a little"
    )
    prompt_format: Literal["chat", "raw"] = Field(
        "chat", description="chat: a plain prompt becomes a user turn of the model's chat template; raw: as it is"
    )
    threads: int = Field(0, ge=0, description="CPU threads; 0: all cores, on a shared machine set fewer")
    max_rows: Count = Field(32, description="prompts denoised together")
    interactive_rows: int = Field(
        4, ge=0, description="so many rows over max_rows that only requests of `producer serve` use"
    )
    max_step_tokens: Count = Field(2048, description="positions in one forward; longer prompts prefill in chunks")
    prefix_cache_mb: int = Field(
        256, ge=0, description="memory for beginnings that prompts share, such as a system prompt; 0: off"
    )
    answer_cache_mb: Annotated[int, Field(ge=0)] = Field(
        0, description="disk space for answers under .answers/, given again to rows that ask the same; 0: off"
    )
    linger_ms: int = Field(50, ge=0, description="an idle worker that sees a first job waits this long for more")
    max_attempts: Count = Field(3, description="attempts per prompt before it is failed")
    retry_base_s: Seconds = Field(2.0, description="first retry delay; doubles each time, with full jitter")
    retry_max_s: Seconds = Field(60.0, description="longest retry delay")
    lease_s: Seconds = Field(30.0, description="a job not renewed for this long returns to the queue")
    scan_s: Seconds = Field(10.0, description="seconds between looks for lost jobs and unsealed batches")
    grace_s: Annotated[float, Field(ge=0)] = Field(
        20.0, description="seconds to finish running prompts after SIGTERM; the rest is given back"
    )
    step_timeout_s: Seconds = Field(
        300.0, description="a denoise step that takes longer hangs: the worker's process ends and begins anew"
    )
    max_restarts: Count = Field(
        5, description="new beginnings in a row without a finished prompt, after which a worker gives up"
    )
    name: str | None = Field(None, description="worker name; default: host and process id")


S = TypeVar("S", bound=Settings)


def read(kind: type[S], flags: dict[str, Any] | None = None) -> S:
    """The settings of `kind`, frozen. `flags` are what the command line gave; None values count as not given.

    Raises SettingsError naming the place (flag, variable or file), the value and what would be right.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown_environment()
    root = Path(given.get("root") or os.environ.get(f"{PREFIX}ROOT") or ".")
    file = Folders(root).configs / kind.file_name
    from_file = _read_file(file, kind)
    # Precedence: pydantic-settings ranks init above environment, so file values step back where the environment speaks.
    for name in list(from_file):
        if os.environ.get(PREFIX + name.upper()):
            del from_file[name]
    try:
        return kind(**{**from_file, **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        where = _place(str(first["loc"][0]), given, file if first["loc"][0] in from_file else None)
        message = first["msg"].removeprefix("Value error, ")
        value = "…" if name in ("redis_url", "outputs_url") else repr(first["input"])
        raise SettingsError(f"{where}: {name} = {value}: {message}") from None


def _place(name: str, given: dict[str, Any], file: Path | None) -> str:
    """Where a setting's value came from: flags beat the environment, and file values gave way to it before."""
    if name in given:
        return f"--{name.replace('_', '-')}"
    return str(file) if file else f"{PREFIX}{name.upper()}"


def _read_file(file: Path, kind: type[Settings]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not readable as YAML: {_unreadable(error)}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: expected 'name: value' lines, found a {type(values).__name__}")
    for name in values:
        if name not in kind.model_fields:
            raise SettingsError(f"{file}: unknown setting '{name}'{nearest(str(name), kind.model_fields)}")
    return values


def _unreadable(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What and where, without the text around it, which may hold a password."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split()) if isinstance(error, UnicodeDecodeError) else type(error).__name__


def _refuse_unknown_environment() -> None:
    known = {PREFIX + name.upper() for kind in (ProducerSettings, WorkerSettings) for name in kind.model_fields}
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            raise SettingsError(f"unknown environment variable {name}{nearest(name, known)}")
