"""Who may import whom, and that importing does nothing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("contract", "producer", "worker")
QUEUE_MODULES = {"contract.queues", "contract.sealing", "worker.intake", "worker.lanes", "worker.reconciler"}
ENGINE_MAY_USE = {"contract.sampling", "contract.errors"}
ENGINE_LIBRARIES = {"torch", "safetensors", "numpy"}
MAY_USE_TRANSFORMERS = {"worker.engine.canvas.native"}


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found: dict[str, Path] = {}
    for package in OURS:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


@cache
def imports(module: str, at_import_only: bool = False) -> frozenset[str]:
    """Dotted names that `module` imports; names imported from a package of ours count as its modules where they are."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in _nodes(tree, at_import_only):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module}: relative import"
            found.update(_meant(node.module, alias.name) for alias in node.names)
    return frozenset(found)


def _nodes(tree: ast.AST, at_import_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_import_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _nodes(node, at_import_only)


def _meant(package: str, name: str) -> str:
    return f"{package}.{name}" if f"{package}.{name}" in MODULES else package


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offenders(inside: str, *forbidden: str) -> list[str]:
    """`module imports name` for every forbidden import in the package `inside`."""
    return [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, inside)
        for name in sorted(imports(module))
        if any(within(name, package) for package in forbidden)
    ]


def test_every_package_was_found() -> None:
    for module in ("contract.jobs", "producer.cli", "worker.cli", "worker.engine", "worker.engine.models.llada"):
        assert module in MODULES


def test_contract_knows_neither_side_nor_torch() -> None:
    assert offenders("contract", "producer", "worker", "torch", "transformers") == []


def test_only_the_commands_know_options() -> None:
    using = {module for module in MODULES if "contract.flags" in imports(module)}
    assert {module for module in using if not within(module, "producer.commands")} == {"worker.cli"}
    with_typer = {module for module in MODULES if any(within(name, "typer") for name in imports(module))}
    assert {module for module in with_typer if within(module, "contract")} == {"contract.flags"}


def test_producer_knows_neither_worker_nor_models() -> None:
    assert offenders("producer", "worker", "torch", "transformers", "safetensors") == []


def test_worker_does_not_know_the_producer() -> None:
    assert offenders("worker", "producer") == []


def test_the_engine_uses_itself_parameters_and_errors_only() -> None:
    allowed = ENGINE_LIBRARIES | set(sys.stdlib_module_names)
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, "worker.engine")
        for name in imports(module)
        if not within(name, "worker.engine") and name not in ENGINE_MAY_USE and name.split(".")[0] not in allowed
        if not (within(name, "transformers") and module in MAY_USE_TRANSFORMERS)
        if not (within(name, "torchao") and module == "worker.engine.models.quantized")
    ]
    assert wrong == []


def test_the_worker_uses_the_engine_by_its_front_door() -> None:
    """What `worker.engine` names is what the rest may use."""
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, "worker") and not within(module, "worker.engine")
        for name in imports(module)
        if within(name, "worker.engine") and name != "worker.engine"
    ]
    assert wrong == []


def test_only_the_queue_modules_know_rq() -> None:
    using = {module for module in MODULES if any(within(name, "rq") for name in imports(module))}
    assert using <= QUEUE_MODULES


def test_imports_run_one_way() -> None:
    """A cycle would raise; packages are left out, since importing a module always imports its packages first."""
    graph = {
        module: {name for name in imports(module, at_import_only=True) if name in MODULES and name != module}
        for module in MODULES
    }
    assert set(TopologicalSorter(graph).static_order()) == set(MODULES)


IMPORT_EVERYTHING = """
import importlib, json, logging, sys, threading
root = logging.getLogger()
before = (list(root.handlers), root.level, sys.excepthook)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import signal, torch
assert (list(root.handlers), root.level, sys.excepthook) == before, "logging was set up"
for name in json.loads(sys.argv[1]):
    assert not logging.getLogger(name).handlers, name
assert threading.active_count() == 1, threading.enumerate()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
assert not torch.cuda.is_initialized()
"""


def test_importing_every_module_does_nothing(tmp_path: Path) -> None:
    """No file, no output, no logging, no thread, no signal handler, no device."""
    done = _python(tmp_path, "-c", IMPORT_EVERYTHING, json.dumps(list(MODULES)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("command", ["producer", "worker"])
def test_help_is_quick_and_does_nothing(tmp_path: Path, command: str) -> None:
    """Seconds of imports would make `--help` feel broken; `-X importtime` lists what was imported."""
    program = f"import sys; from {command}.cli import app; app(['--help'], prog_name='{command}')"
    done = _python(tmp_path, "-X", "importtime", "-c", program)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert f"{command}.cli" in imported
    assert not imported & {"torch", "transformers"}
    assert list(tmp_path.rglob("*")) == []


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in an empty folder that is also its home and its place for temporary files."""
    here = {name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    environment = {**os.environ, **here, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
