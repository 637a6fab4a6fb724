"""Names of metrics: Prometheus' conventions, and nothing in dashboard and alarms that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from contract import metrics
from contract.metrics import METRICS

ROOT = Path(__file__).parents[2]
STANDARD = {"process_resident_memory_bytes", "process_start_time_seconds", "up"}
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            if key in ("expr", "query"):
                yield str(one)
            else:
                yield from strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def names(file: str) -> set[str]:
    document = yaml.safe_load((ROOT / "deploy" / file).read_text(encoding="utf-8"))
    return {name for text in strings(document) for name in re.findall(r"\b(?:dllm_|process_)\w+|\bup\b", text)}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: str(metric.name))
def test_names_follow_the_conventions(metric: metrics.Metric) -> None:
    assert re.fullmatch(r"dllm_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    if metric.kind == "histogram" or "time" in metric.meaning.split()[:1]:
        assert metric.name.endswith("_seconds")
    assert not metric.name.endswith(("_ms", "_mb", "_percent"))


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_dashboard_and_alarms_name_only_what_there_is(file: str) -> None:
    parts = {f"{name}{end}" for name, one in METRICS.items() if one.kind == "histogram" for end in ("_bucket", "_sum")}
    assert names(file) - {"process_start_time_seconds"} <= {*METRICS, *parts, *STANDARD}


def test_the_dashboard_shows_every_metric_but_the_ones_that_are_only_labels() -> None:
    shown = {name.removesuffix("_bucket").removesuffix("_sum") for name in names("grafana.json")}
    unshown = {"dllm_worker_info", "dllm_prompt_tokens_total", "dllm_redis_up", "dllm_redis_persistence_ok"}
    unshown.add("dllm_output_tokens_per_second")  # a rate over a longer time is steadier
    assert set(METRICS) - shown == unshown
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_operations_guide_tells_every_alarm() -> None:
    document = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text(encoding="utf-8"))
    alarms = [rule["alert"] for group in document["groups"] for rule in group["rules"]]
    table = OPERATIONS.partition("## Alarms")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == alarms
    for group in document["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "action"}
            assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_document_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics.document()
