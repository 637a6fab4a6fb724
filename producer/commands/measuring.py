"""`bench-endpoint`: how fast a server answers, ours or another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from contract.flags import Root, among
from contract.settings import ProducerSettings, read
from producer.commands.options import Debug
from producer.commands.session import INTERRUPTED, errors


def bench_endpoint(
    base_url: Annotated[str, typer.Option("--base-url", help="Address of the API, such as http://127.0.0.1:8000/v1")],
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", help="Key; DLLM_API_KEY and OPENAI_API_KEY show it to fewer"),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model (else the only one that the server lists)")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt to send; may be repeated (else eight built-in ones)")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="File of prompts: .txt, one a line, or .jsonl as for `submit`")
    ] = None,
    api: Annotated[
        str, typer.Option("--api", help="chat or completions", autocompletion=among(("chat", "completions")))
    ] = "chat",
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Ask for streams, which tell the time to the first token")
    ] = True,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Longest answer (else the prompt's own, else 128)")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="NAME=VALUE", help="Any other field of the request; may be repeated"),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured rounds of each level")] = 5,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Levels: calls at a time")] = "1,4,16",
    calls: Annotated[
        int | None,
        typer.Option("--calls", min=1, help="Calls of a round (else 8, or 4 for each at a time if that is more)"),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Calls for each at a time, before the rounds")] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.001, help="Seconds for one whole call")] = 120.0,
    price_per_million_input: Annotated[float | None, typer.Option(min=0, help="For the cost of calls")] = None,
    price_per_million_output: Annotated[float | None, typer.Option(min=0, help="For the same")] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0, help="Price of an hour of all that serves the endpoint, for the same")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there; - for stdout alone")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the report there too")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it there too, as PNG")] = None,
    root: Root = None,
    debug: Debug = False,
) -> None:
    """Measure how fast an OpenAI-compatible server answers; exits 1 if calls failed. Needs neither Redis nor a worker.

    Example: producer bench-endpoint --base-url http://127.0.0.1:8000/v1 --model demo --concurrency 1,4,16
    """
    with errors(debug):
        from producer.endpoint import command as endpoint

        flags: dict[str, Any] = {"root": root, "price_per_hour": price_per_hour}
        flags |= {"price_per_million_input": price_per_million_input}
        flags |= {"price_per_million_output": price_per_million_output}
        settings = read(ProducerSettings, flags)
        task = endpoint.Task(
            base_url=base_url,
            model=model,
            prompts=tuple(prompt or ()),
            prompts_file=prompts,
            api=api,
            stream=stream,
            max_tokens=max_tokens,
            params=tuple(param or ()),
            rounds=rounds,
            concurrency=concurrency,
            calls=calls,
            warmup=warmup,
            timeout_s=timeout_s,
            json_file=json_file,
            markdown_file=markdown_file,
            plot_file=plot_file,
        )
        found = endpoint.bench(task, settings, endpoint.api_key(api_key, settings, os.environ))
        if found.interrupted:
            raise typer.Exit(INTERRUPTED)
        if found.failed:
            raise typer.Exit(1)
