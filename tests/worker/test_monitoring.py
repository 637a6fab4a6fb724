"""What a worker tells at its port, from plain values."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from contract.errors import SettingsError
from contract.metrics import METRICS, WORKER
from contract.monitoring import registry_of
from contract.settings import WorkerSettings
from worker.monitoring import Standing
from worker.progress import Phase, Progress
from worker.steptimes import BUCKETS_S, StepTimes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in found for one in family.samples}


class Model:
    """A model as the metrics see one."""

    stats = SimpleNamespace(prefill_positions=90)
    engine = SimpleNamespace(max_rows=8, stats=stats, reused_positions=30)

    def place(self) -> dict[str, str]:
        return {"model": "demo", "device": "cuda:0", "dtype": "bfloat16", "quantize": "none"}

    def device_memory(self) -> dict[tuple[str, str], int]:
        return {("0", "allocated"): 1 << 30}


@pytest.fixture
def standing(worker_settings: Callable[..., WorkerSettings]) -> Callable[..., Standing]:
    def make(**settings: Any) -> Standing:
        return Standing(worker_settings(step_timeout_s=10, **settings), Progress(), "w")

    return make


def test_every_metric_of_a_worker_is_there_with_its_labels(standing: Callable[..., Standing]) -> None:
    one = standing()
    one.model, one.intake = Model(), SimpleNamespace(tally={"retried": 2, "lost": 1}, beaten_at=time.monotonic())  # type: ignore[assignment]
    one.progress.turn(Phase.WORKING)
    one.progress.failures["model_error"] += 3
    one.progress.tokens, one.progress.finished, one.progress.rows = 40, 4, 5
    found = samples(generate_latest(registry_of(one)).decode())
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in found}
    assert {name for name in names if name.startswith("dllm_")} == {metric.name for metric in WORKER}
    for name, labels in found:
        if metric := METRICS.get(name):
            assert {label for label, _ in labels} == set(metric.labels)
    assert found["dllm_rows_failed_total", (("code", "model_error"),)] == 3
    assert found["dllm_output_tokens_total", ()] == 40
    assert found["dllm_rows_in_flight", ()] == 5
    assert found["dllm_prompt_positions_total", (("source", "reused"),)] == 30
    assert found["dllm_gpu_memory_bytes", (("gpu", "0"), ("kind", "allocated"))] == 1 << 30
    assert found["dllm_leases_lost_total", ()] == 1
    assert found["dllm_worker_ready", ()] == 1
    assert found["process_resident_memory_bytes", ()] > 0


def test_steps_are_counted_by_phase_and_time() -> None:
    times, stats = StepTimes(), SimpleNamespace(prefill_s=0.0, denoise_s=0.0, commit_s=0.0, logits_s=0.0, host_s=0.0)
    for seconds in (0.002, 0.02, 0.02, 1000.0):
        stats.denoise_s += seconds
        times.observe(stats)  # type: ignore[arg-type]
    buckets = dict(times.buckets("denoise"))
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.025"], buckets["60.0"], buckets["+Inf"]) == (0, 1, 3, 3, 4)
    assert times.sums["denoise"] == pytest.approx(1000.042)
    assert dict(times.buckets("prefill"))["+Inf"] == 0
    assert list(BUCKETS_S) == sorted(BUCKETS_S)


def test_alive_and_ready_are_two_things(standing: Callable[..., Standing]) -> None:
    one = standing(lease_s=5)
    assert one.stuck() == []
    assert one.unready() == ["the worker is loading"]
    one.progress.turn(Phase.WORKING)
    one.intake = SimpleNamespace(beaten_at=time.monotonic())  # type: ignore[assignment]
    assert one.unready() == []
    one.progress.disk_full = True
    assert "cannot be written" in one.unready()[0]
    one.progress.disk_full = False
    one.intake.beaten_at -= 6  # type: ignore[union-attr]
    assert one.unready() == ["Redis has not answered for 6 s"]
    assert one.stuck() == []
    one.progress.turned_at -= 11
    assert one.stuck() == ["the loop has made no turn for 11 s"]
    one.progress.phase = Phase.PUBLISHING
    assert one.stuck() == []


def test_the_port_answers_while_it_is_open_and_cannot_be_had_twice(standing: Callable[..., Standing]) -> None:
    port = free_port()
    one = standing(metrics_port=port)
    address = f"http://127.0.0.1:{port}"
    with one.monitor():
        assert httpx2.get(f"{address}/healthz").json() == {"ok": True, "problems": []}
        unready = httpx2.get(f"{address}/readyz?verbose")
        assert (unready.status_code, unready.json()["problems"]) == (503, ["the worker is loading"])
        assert httpx2.get(f"{address}/etc/passwd").status_code == 404
        assert httpx2.post(f"{address}/metrics").status_code == 501
        assert "dllm_worker_ready 0.0" in httpx2.get(f"{address}/metrics").text
        with pytest.raises(SettingsError, match=f"metrics_port = {port} at 127.0.0.1 cannot be had"), one.monitor():
            pass
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{address}/healthz")
    with one.monitor():
        assert json.loads(httpx2.get(f"{address}/healthz").content)["ok"]


def test_without_a_port_nothing_is_opened(standing: Callable[..., Standing]) -> None:
    with standing().monitor() as nothing:
        assert nothing is None
