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
    for package in ("contract", "producer", "worker", "worker/engine", "worker/engine/canvas", "worker/bench"):
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
