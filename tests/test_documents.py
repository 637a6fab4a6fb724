"""What the documents say about settings, error codes and files is what the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract.jobs import REMEDIES, RETRIES, ErrorCode
from contract.sampling import SamplingParams
from contract.settings import ProducerSettings, Settings, WorkerSettings
from worker.engine.models.registry import CANVAS_FAMILIES, FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None or isinstance(default, SamplingParams) else str(default)


@pytest.mark.parametrize("kind", [ProducerSettings, WorkerSettings])
def test_the_readme_lists_every_setting_with_its_default(kind: type[Settings]) -> None:
    for name, field in kind.model_fields.items():
        assert f"| `{name}` | {shown(field.default)} | {field.description} |" in README


def test_the_readme_lists_every_error_code_with_its_remedy() -> None:
    for code, remedy in REMEDIES.items():
        assert f"| `{code}` | {remedy} |" in README


def test_the_operations_guide_says_for_every_error_code_how_often_it_is_tried_again() -> None:
    words = {None: "up to `max_attempts`", 0: "never", 1: "once"}
    for code in ErrorCode:
        assert f"| `{code}` | {words[RETRIES.get(code, 0)]} |" in OPERATIONS


def test_a_dead_workers_rows_run_again_within_what_the_operations_guide_says() -> None:
    usual = WorkerSettings.model_fields["lease_s"].default + WorkerSettings.model_fields["scan_s"].default
    assert usual < 60
    assert f"run again within `lease_s + scan_s` ({usual:g} s unless set otherwise)" in " ".join(OPERATIONS.split())


def test_every_promise_of_the_operations_guide_is_held_by_a_test_that_there_is() -> None:
    table = OPERATIONS.partition("## What holds each promise")[2]
    promises = re.findall(r"^\| [^|]* \| ([^|]+) \| ([^|]+) \|$", table, flags=re.MULTILINE)
    assert len(promises) > 40
    for promise, held_by in promises:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", held_by)
        assert tests, promise
        for file, test in tests:
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (promise, test)


def test_the_readme_lists_every_sampling_parameter() -> None:
    for name in SamplingParams.model_fields:
        assert f"`{name}`" in README


@pytest.mark.parametrize("kind", [ProducerSettings, WorkerSettings])
def test_the_commented_defaults_in_configs_are_the_real_ones(kind: type[Settings]) -> None:
    text = (ROOT / "configs" / kind.file_name).read_text(encoding="utf-8")
    named = dict(re.findall(r"^# (\w+): (\S.*)$", text, flags=re.MULTILINE))
    for name, field in kind.model_fields.items():
        if name not in ("root", "params"):
            assert yaml.safe_load(named[name]) == field.default, name


def test_every_module_is_in_the_readmes_tree_and_every_link_leads_somewhere() -> None:
    for package in (
        "contract",
        "producer",
        "producer/commands",
        "worker",
        "worker/engine",
        "worker/engine/canvas",
        "worker/bench",
    ):
        for module in (ROOT / package).glob("[!_]*.py"):
            assert re.search(rf"^  {re.escape(module.name)} ", README, flags=re.MULTILINE), module
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("file", sorted((ROOT / "docs").glob("*.md")), ids=lambda file: file.name)
def test_every_link_of_the_other_documents_leads_somewhere(file: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", file.read_text(encoding="utf-8")):
        assert (file.parent / link).exists(), link


def test_the_readme_lists_every_family() -> None:
    for architecture in FAMILIES | CANVAS_FAMILIES:
        assert re.search(rf"^\| [^|]+ \| [^|]*`{architecture}`", README, flags=re.MULTILINE), architecture
