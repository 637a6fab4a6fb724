"""The `worker` command: run, generate, check, bench. The last stage of a prompt's life starts here."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from structlog.stdlib import BoundLogger

from contract import logs, settings
from contract.errors import DllmError, UsageError
from contract.flags import Model as ModelName
from contract.flags import RedisUrl, Root, choices, sampling_flags
from contract.sampling import parse_params
from contract.settings import WorkerSettings
from contract.terminal import safe, safe_lines
from worker.progress import Progress
from worker.restarts import Restarts

if TYPE_CHECKING:  # torch takes seconds to import, and `worker --help` should not
    from worker.model import Model

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
err = Console(stderr=True)

Device = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda or cuda:N; `run` also takes several with commas, or all.")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float32, bfloat16 or float16.", autocompletion=choices(WorkerSettings, "dtype")),
]
QuantizeName = Annotated[
    str | None,
    typer.Option(
        "--quantize",
        help="none, int8 or int4: weights in fewer bits, by torchao.",
        autocompletion=choices(WorkerSettings, "quantize"),
    ),
]
SetName = Annotated[str, typer.Option("--set", help="short, medium, long, mixed, or a JSONL file.")]


def main() -> None:
    """Entry point: our errors become one line on stderr and an exit code (1 failed, 2 wrong usage)."""
    try:
        app()
    except DllmError as error:
        err.print(f"error: {safe(str(error))}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


@app.command()
def run(
    root: Root = None,
    redis_url: RedisUrl = None,
    model: ModelName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: QuantizeName = None,
    max_rows: Annotated[int | None, typer.Option(help="Prompts denoised together.")] = None,
    name: Annotated[str | None, typer.Option(help="Worker name; default: host and process id.")] = None,
    burst: Annotated[bool, typer.Option(help="Stop when no work is left.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve /metrics, /healthz and /readyz there; with several devices, from there on."),
    ] = None,
    supervisor: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Take prompts from the queue and denoise them until told to stop; on several devices with one process each.

    Example: worker run --model demo --max-rows 32
    """
    flags = {"root": root, "redis_url": redis_url, "model": model, "dtype": dtype, "quantize": quantize}
    flags |= {"max_rows": max_rows}
    config = settings.read(WorkerSettings, flags | {"device": device, "name": name, "metrics_port": metrics_port})
    from worker.devices import devices

    places = devices(config.device)
    if len(places) > 1:
        raise typer.Exit(_supervise(places, config, burst, flags))
    _work(config.model_copy(update={"device": places[0]}), burst, supervisor)


def _supervise(places: list[str], config: WorkerSettings, burst: bool, flags: dict[str, Any]) -> int:
    from worker.intake import worker_name
    from worker.supervisor import supervise

    name = worker_name(config)
    config.folders.create()
    logs.set_up(config, f"worker-{name}", worker=name)
    return supervise(places, name, burst, flags, logs.get(), config.metrics_port)


def _work(config: WorkerSettings, burst: bool, supervisor: int | None) -> None:
    """Be the worker of one device, again and again if the device demands it."""
    from worker.intake import worker_name

    worker = worker_name(config)
    config.folders.create()
    logs.set_up(config, f"worker-{worker}", worker=worker)
    log = logs.get()
    log.info("worker_started", model=config.model, device=config.device)
    progress = Progress()
    try:
        with Restarts(config.max_restarts, progress, log, supervisor) as restarts:
            _denoise(config, burst, supervisor, progress, restarts)
    except DllmError as error:
        log.critical("process_failed", reason=str(error))
        raise
    except Exception:
        log.critical("process_failed", exc_info=True)
        raise
    log.info("worker_stopped")


def _denoise(
    config: WorkerSettings, burst: bool, supervisor: int | None, progress: Progress, restarts: Restarts
) -> None:
    """Load the model and work until told to stop."""
    # Imported here: torch and transformers take seconds, and `worker --help` should not.
    from contract.ledger import Ledger
    from contract.server import open_redis
    from worker.answers import Answers
    from worker.fingerprint import identity
    from worker.intake import Intake, worker_name
    from worker.loop import Loop
    from worker.monitoring import Standing
    from worker.supervisor import report
    from worker.throughput import TokenRate
    from worker.uploads import opened as outputs_of
    from worker.watchdog import Watchdog

    log = logs.get()
    kept = config.folders.answers
    rate = TokenRate()
    standing = Standing(config, progress, worker_name(config))

    def vitals() -> dict[str, str | int | float]:
        now = {"step": progress.steps, "rows": progress.rows, "peak_memory_mb": opened.peak_memory_mb()}
        now |= {"most_rows": opened.engine.most_rows}
        return {**opened.place(), **now, "tokens_per_s": rate.of(progress.tokens, time.monotonic())}

    with ExitStack() as stack:
        stack.enter_context(standing.monitor())
        redis = open_redis(config)
        ledger = Ledger(redis)
        opened = _loaded(config, log)
        known_as = identity(opened, kept / "fingerprints") if config.answer_cache_mb else b""
        intake = stack.enter_context(Intake(redis, ledger, config, vitals, restarts.predecessor))
        outputs = stack.enter_context(outputs_of(config.folders, ledger, intake.name))
        answers = stack.enter_context(Answers(kept, config.answer_cache_mb, known_as, opened.always_samples))
        stack.enter_context(Watchdog(progress, config.step_timeout_s, intake.evidence.ended, restarts.again, log))
        standing.model, standing.intake = opened, intake
        loop = Loop(intake, opened, outputs, config.grace_s, log, config.log_prompts, progress, answers)

        def stop() -> None:
            restarts.stop()
            loop.stop()

        with _signals(stop):
            if supervisor is not None:
                report(supervisor, stop)
            loop.run(burst)


def _loaded(config: WorkerSettings, log: BoundLogger) -> Model:
    from worker.model import open_model

    started = time.perf_counter()
    logs.adopt_libraries()
    opened = open_model(config)
    log.info("model_loaded", seconds=round(time.perf_counter() - started, 2), **opened.describe())
    return opened


@contextmanager
def _signals(stop: Any) -> Iterator[None]:
    """SIGTERM and SIGINT ask the loop to stop: the first with grace, the second at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command()
@sampling_flags("timeout_s")  # looked at by the worker's loop, which is not here
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    root: Root = None,
    model: ModelName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: QuantizeName = None,
    *,
    sampling: dict[str, Any],
    output_file: Annotated[Path | None, typer.Option(help="Write the answer here instead of stdout.")] = None,
) -> None:
    """Answer one prompt without a queue.

    Example: worker generate "What is the capital of France?" --max-new-tokens 64 --denoise-steps 20
    """
    params = parse_params(sampling)
    flags = {"root": root, "model": model, "device": device, "dtype": dtype, "quantize": quantize, "max_rows": 1}
    config = settings.read(WorkerSettings, flags)
    from worker.devices import devices
    from worker.model import open_model
    from worker.transcript import Transcript, answer

    opened = open_model(config.model_copy(update={"device": devices(config.device)[0]}))
    opened.engine.add(opened.request("generate", prompt, params))
    finished, transcript = None, Transcript(opened.tokenizer, params.stop)
    while finished is None:
        finished = next(iter(opened.engine.step()), None)
        if params.stop:
            transcript.take(opened.engine.progress("generate", len(transcript.token_ids)))
        if transcript.stopped:
            finished = finished or opened.engine.cut("generate", len(transcript.token_ids))
    if finished.error is not None:
        raise finished.error
    found = answer(opened.tokenizer, finished.token_ids, params.stop)
    _deliver(found.text, output_file)
    tokens = found.tokens
    err.print(
        f"{tokens} tokens in {finished.seconds:.2f} s ({tokens / finished.seconds:.1f} tokens/s), {finished.steps} "
        f"denoise steps, {finished.tokens_per_forward:.2f} tokens per forward",
        highlight=False,
    )


def _deliver(text: str, output_file: Path | None) -> None:
    if output_file is None:
        sys.stdout.write((safe_lines(text) if sys.stdout.isatty() else text) + "\n")
        return
    try:
        output_file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {output_file}: {error.strerror}") from None


@app.command()
def check(
    root: Root = None,
    redis_url: RedisUrl = None,
    model: ModelName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: QuantizeName = None,
) -> None:
    """Say, line by line, whether this machine can work: environment, folders, Redis, model, memory.

    Example: worker check --model demo
    """
    flags = {"root": root, "redis_url": redis_url, "model": model}
    flags |= {"device": device, "dtype": dtype, "quantize": quantize}
    config = settings.read(WorkerSettings, flags)
    from worker.checks import CHECKS

    failed = 0
    for title, examine in CHECKS.items():
        try:
            typer.echo(f"ok    {title}: {examine(config)}")
        except (DllmError, OSError) as error:
            failed += 1
            typer.echo(f"FAIL  {title}: {safe(str(error))}")
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    root: Root = None,
    model: ModelName = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: QuantizeName = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    prompt_set: SetName = "mixed",
    prompts: Annotated[int | None, typer.Option(min=1, help="Only so many of the set, evenly chosen.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts denoised together.")] = 32,
    compare: Annotated[str, typer.Option(help="Baselines: reference, single, static, ar, causal; with commas.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds; the report holds the median.")] = 5,
    budget_s: Annotated[float, typer.Option(help="Seconds per round for reference, single and ar each.")] = 20.0,
    sweep: Annotated[str | None, typer.Option(help="PARAMETER=V1,V2,…: time, memory and quality by value.")] = None,
    plot: Annotated[Path, typer.Option(help="Where --sweep draws its plot.")] = Path("sweep.png"),
    scale: Annotated[str | None, typer.Option(help="N1,N2,…: cost per token with so many prompts queued.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here too.")] = None,
) -> None:
    """Measure the engine on this machine, beside baselines with the same weights and prompts.

    Example: worker bench --model demo --compare reference,single,static,ar,causal --rounds 5 --json bench.json
    """
    flags = {"root": root, "model": model, "device": device, "dtype": dtype, "quantize": quantize}
    flags |= {"threads": threads, "max_rows": rows}
    config = settings.read(WorkerSettings, flags)
    from worker.bench.command import Task, measure

    task = Task(prompt_set, prompts, compare, rounds, budget_s, sweep, plot, scale)
    document = measure(config, task, lambda line: err.print(line, markup=False, highlight=False), Console())
    if json_file is not None:
        _deliver(json.dumps(document, indent=1), json_file)
