"""The `producer` command: what there is in `producer.commands`, in the order in which `--help` lists it."""

from __future__ import annotations

from collections.abc import Callable

import typer

from producer.commands import installing, keeping, measuring, mending, reviewing, serving, submitting, telling

app = typer.Typer(
    name="producer",
    help="Submit prompts for diffusion language models, and see what became of them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "watch": submitting.watch,
    "submit": submitting.submit,
    "rerun": mending.rerun,
    "init": installing.init,
    "status": reviewing.status,
    "results": reviewing.results,
    "failed": reviewing.failed,
    "retry": mending.retry,
    "cancel": mending.cancel,
    "export": keeping.export,
    "delete": keeping.delete,
    "logs": telling.logs,
    "report": telling.report,
    "doctor": mending.doctor,
    "serve": serving.serve,
    "dashboard": serving.dashboard,
    "key": serving.key,
    "bench-endpoint": measuring.bench_endpoint,
    "stop-server": installing.stop_server,
}
for name, command in COMMANDS.items():
    app.command(name)(command)


def main() -> None:
    """Entry point of the installed command."""
    app()
