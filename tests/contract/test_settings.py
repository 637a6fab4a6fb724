"""A setting comes from the flag, else the environment, else the file, else its default; a mistake names its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from contract import settings
from contract.errors import SettingsError
from contract.settings import ProducerSettings, WorkerSettings


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    return tmp_path


def configure(root: Path, text: str, name: str = "worker.yaml") -> Path:
    path = root / "configs" / name
    path.write_text(text, encoding="utf-8")
    return path


def read(root: Path, kind: Any = WorkerSettings, **flags: Any) -> Any:
    return settings.read(kind, {"root": root, **flags})


def fault(root: Path, kind: Any = WorkerSettings, **flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        read(root, kind, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Precedence


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("22:00", "22:00"),  # a number of sixties, says YAML
        ('"22:00"', "22:00"),
        ("06:05", "06:05"),
        ("+2h", "+2h"),
        ("2026-12-03T22:00", "2026-12-03T22:00"),
        ("2026-12-03T22:00:30", "2026-12-03T22:00:30"),
        ("2026-12-03", "2026-12-03"),
    ],
)
def test_times_in_a_file_need_no_quotes(root: Path, written: str, meant: str) -> None:
    configure(root, f"not_before: {written}\nwindow: 22:00-06:00\n", "producer.yaml")
    found = read(root, ProducerSettings)
    assert (found.not_before, found.window) == (meant, "22:00-06:00")


@pytest.mark.parametrize(
    "line", ["not_before: 2200", "not_before: soon", "not_before: true", "window: 22:00", "window: 22"]
)
def test_wrong_hours_in_a_file_are_refused(root: Path, line: str) -> None:
    configure(root, f"{line}\n", "producer.yaml")
    with pytest.raises(SettingsError, match=rf"{line.partition(':')[0]} = .*: give .* such as 22:00"):
        read(root, ProducerSettings)


def test_flag_then_environment_then_file_then_default(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(root).max_rows == 32
    configure(root, "max_rows: 2\nlinger_ms: 7\n")
    assert read(root).max_rows == 2
    monkeypatch.setenv("DLLM_MAX_ROWS", "3")
    assert read(root).max_rows == 3
    assert read(root, max_rows=4).max_rows == 4
    assert read(root, max_rows=None).max_rows == 3
    assert read(root).linger_ms == 7


def test_an_empty_variable_counts_as_not_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(root, "max_rows: 2\n")
    monkeypatch.setenv("DLLM_MAX_ROWS", "")
    assert read(root).max_rows == 2


def test_the_environments_root_is_where_the_file_is_looked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(root, "max_rows: 2\n")
    monkeypatch.setenv("DLLM_ROOT", str(root))
    found = settings.read(WorkerSettings)
    assert found.max_rows == 2
    assert found.folders.root == root.resolve()


def test_producer_and_worker_have_files_of_their_own(root: Path) -> None:
    configure(root, "max_rows: 2\n")
    configure(root, "max_queued: 5\nparams:\n  temperature: 0.5\n", "producer.yaml")
    found = read(root, ProducerSettings)
    assert (found.max_queued, found.params.temperature) == (5, 0.5)


def test_the_other_ones_variables_are_not_unknown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_MAX_QUEUED", "5")
    assert read(root).max_rows == 32


def test_parameters_may_come_from_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_PARAMS", '{"temperature": 0.5}')
    assert read(root, ProducerSettings).params.temperature == 0.5


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_changes_nothing(root: Path, text: str) -> None:
    configure(root, text)
    assert read(root) == read(root)


def test_settings_are_frozen(root: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read(root).max_rows = 1


def test_the_queues_are_named_after_the_last_part_of_the_models_path(root: Path) -> None:
    assert read(root, model="/models/LLaDA-8B/").queue_model == "LLaDA-8B"


# Mistakes


def test_an_unknown_name_in_the_file_is_refused_with_the_nearest(root: Path) -> None:
    path = configure(root, "max_row: 2\n")
    assert fault(root) == f"{path}: unknown setting 'max_row' (did you mean 'max_rows'?)"


def test_an_unknown_variable_is_refused_with_the_nearest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLLM_REDIS_ULR", "redis://x")
    assert fault(root) == "unknown environment variable DLLM_REDIS_ULR (did you mean 'DLLM_REDIS_URL'?)"


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tmax_rows: 2"])
def test_a_file_that_is_no_yaml_is_named(root: Path, text: str) -> None:
    path = configure(root, text)
    assert fault(root).startswith(f"{path}: not readable as YAML: ")


def test_a_file_in_another_encoding_is_named(root: Path) -> None:
    path = configure(root, "")
    path.write_bytes("name: ü\n".encode("latin-1"))
    assert fault(root).startswith(f"{path}: not readable as YAML: ")


@pytest.mark.parametrize("text", ["- max_rows\n", "max_rows\n"])
def test_a_file_that_is_no_mapping_is_named(root: Path, text: str) -> None:
    path = configure(root, text)
    assert fault(root).startswith(f"{path}: expected 'name: value' lines, found a ")


def test_a_bad_value_in_the_file_names_the_file(root: Path) -> None:
    path = configure(root, "max_rows: 0\n")
    assert fault(root).startswith(f"{path}: max_rows = 0: ")


def test_a_bad_value_in_the_environment_names_the_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(root, "max_rows: 2\n")
    monkeypatch.setenv("DLLM_MAX_ROWS", "none")
    message = fault(root)
    assert "DLLM_MAX_ROWS" in message
    assert "'none'" in message
    assert "worker.yaml" not in message


def test_a_bad_flag_over_a_good_file_names_the_flag(root: Path) -> None:
    configure(root, "max_rows: 2\n")
    message = fault(root, max_rows=0)
    assert "--max-rows" in message
    assert "worker.yaml" not in message


@pytest.mark.parametrize("value", ["{", "7", '{"temprature": 1}', '{"threshold": 2}'])
def test_bad_parameters_in_the_environment_are_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("DLLM_PARAMS", value)
    assert "DLLM_PARAMS" in fault(root, ProducerSettings)


def test_an_unknown_parameter_in_the_file_is_refused_with_the_nearest(root: Path) -> None:
    path = configure(root, "params:\n  temprature: 0.5\n", "producer.yaml")
    message = fault(root, ProducerSettings)
    assert message.startswith(f"{path}: ")
    assert "did you mean 'temperature'?" in message


def test_parameters_in_the_file_have_the_same_aliases_as_in_a_row(root: Path) -> None:
    configure(root, "params:\n  max_tokens: 9\n", "producer.yaml")
    assert read(root, ProducerSettings).params.max_new_tokens == 9
