"""What `producer watch` tells at its port: queues, batches, workers and Redis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from contract.hours import Hours
from contract.ledger import Ledger
from contract.metrics import METRICS, PRODUCER
from contract.settings import ProducerSettings, WorkerSettings
from producer import monitoring
from producer.monitoring import Health, registry
from producer.watcher import Watcher
from worker.intake import Intake


def samples(found: CollectorRegistry) -> dict[Any, float]:
    families = text_string_to_metric_families(generate_latest(found).decode())
    ours = [one for family in families for one in family.samples if one.name.startswith("dllm_")]
    return {(one.name, *(one.labels[label] for label in METRICS[one.name].labels)): one.value for one in ours}


def test_every_metric_of_a_producer_is_there(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    producer_settings: Callable[..., ProducerSettings],
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    submit(3, "b", unreadable=(1,), created_at=ledger.now() - 100)
    submit(2, "other", model="other", priority="high", created_at=ledger.now() - 5)
    submit(1, "later", created_at=ledger.now() - 500, hours=Hours(not_before=ledger.now() - 50))
    with Intake(redis, ledger, worker_settings(name="w", scan_s=60)):
        found = samples(registry(ledger, producer_settings()))
    assert {name for name, *_ in found} == {metric.name for metric in PRODUCER}
    assert found["dllm_redis_up",] == 1
    assert found["dllm_queue_rows", "demo", "normal"] == 3
    assert found["dllm_queue_rows", "other", "high"] == 2
    assert found["dllm_workers", "demo"] == 1
    assert found["dllm_workers", "other"] == 0
    assert found["dllm_open_batches", "demo"] == 2
    assert found["dllm_open_batch_rows", "demo", "outstanding"] == 3
    assert found["dllm_open_batch_rows", "demo", "failed"] == 1
    assert found["dllm_oldest_batch_age_seconds", "demo"] == pytest.approx(100, abs=20)
    assert found["dllm_disk_free_bytes", "batch_outputs"] > 0


def test_redis_is_asked_once_for_many_scrapes_and_not_waited_for(
    ledger: Ledger, producer_settings: Callable[..., ProducerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    real = ledger.open_batches

    def counted() -> list[str]:
        nonlocal asked
        asked += 1
        return real()

    def hang() -> list[str]:
        time.sleep(0.5)
        raise RedisConnectionError("away")

    monkeypatch.setattr(ledger, "open_batches", counted)
    one = registry(ledger, producer_settings())
    assert samples(one)["dllm_redis_up",] == samples(one)["dllm_redis_up",] == 1
    assert asked == 1
    monkeypatch.setattr(monitoring, "FRESH_S", 0.0)
    monkeypatch.setattr(monitoring, "PATIENCE_S", 0.05)
    monkeypatch.setattr(ledger, "open_batches", hang)
    began = time.monotonic()
    away = samples(one)
    assert time.monotonic() - began < 0.4
    assert away["dllm_redis_up",] == 0
    assert ("dllm_workers", "demo") in away, "the last ones known"
    monkeypatch.setattr(monitoring, "KEPT_S", 0.0)
    assert ("dllm_workers", "demo") not in samples(one)


def test_an_error_of_redis_breaks_no_scrape(
    ledger: Ledger, producer_settings: Callable[..., ProducerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> list[str]:
        raise RedisConnectionError("away")

    monkeypatch.setattr(ledger, "open_batches", away)
    found = samples(registry(ledger, producer_settings()))
    assert found["dllm_redis_up",] == 0
    assert ("dllm_disk_free_bytes", "logs") in found


def test_a_watcher_is_alive_and_ready_or_says_why_not(
    ledger: Ledger, producer_settings: Callable[..., ProducerSettings]
) -> None:
    stopping = False
    watcher = Watcher(producer_settings(), ledger, lambda: stopping)
    health = Health(watcher, lambda: stopping)
    assert health.stuck() == health.unready() == []
    watcher.rounds.outages = 1
    assert health.unready() == ["Redis does not answer"]
    watcher.rounds.outages, stopping = 0, True
    assert health.unready() == ["the producer is stopping"]
    watcher.turned_at -= 1000
    assert "no turn for 1000 s" in health.stuck()[0]
    watcher.turned_at = math.inf
    assert health.stuck() == []
