"""Every metric that producer and workers offer to Prometheus: name, kind, labels, meaning.

`docs/metrics.md` is made of this (`python -m contract.metrics > docs/metrics.md`); tests hold that what is scraped, the
dashboard in `deploy/grafana.json` and the rules in `deploy/alerts.yaml` name nothing else. Names follow Prometheus'
conventions: `dllm_`, base units, `_total` for what only grows.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


def _metric(name: str, kind: Kind, labels: str, meaning: str) -> Metric:
    return Metric(name, kind, tuple(labels.split()), meaning)


WORKER = (
    _metric(
        "dllm_worker_info", "gauge", "worker model device dtype quantize", "1, with what the worker is in its labels"
    ),
    _metric("dllm_worker_ready", "gauge", "", "1 while /readyz says so, else 0"),
    _metric("dllm_rows_in_flight", "gauge", "", "prompts in the engine"),
    _metric(
        "dllm_rows_in_flight_limit",
        "gauge",
        "",
        "prompts that the engine denoises together at most; falls when memory runs out",
    ),
    _metric("dllm_rows_finished_total", "counter", "", "prompts with an answer on the disk"),
    _metric("dllm_rows_failed_total", "counter", "code", "prompts that failed for good"),
    _metric("dllm_row_retries_total", "counter", "", "attempts that failed and will be followed by another"),
    _metric(
        "dllm_leases_lost_total",
        "counter",
        "",
        "prompts that were somebody else's, or cancelled, before they ended here",
    ),
    _metric("dllm_output_tokens_total", "counter", "", "tokens of answers on the disk"),
    _metric("dllm_prompt_tokens_total", "counter", "", "tokens of prompts that were answered"),
    _metric("dllm_output_tokens_per_second", "gauge", "", "tokens of answers per second, over the last minute"),
    _metric(
        "dllm_row_forwards_total",
        "counter",
        "",
        "forwards, summed over answered prompts: output tokens over this are tokens per forward",
    ),
    _metric(
        "dllm_prompt_positions_total",
        "counter",
        "source",
        "prompt positions that were `computed`, and those `reused` from other prompts' beginnings",
    ),
    _metric(
        "dllm_step_seconds",
        "histogram",
        "phase",
        "time of a denoise step by phase: `prefill`, `denoise` and `commit` share the forward by their positions; "
        "`logits`, `host`. On a GPU the wait for the device shows under `logits`",
    ),
    _metric(
        "dllm_gpu_memory_bytes",
        "gauge",
        "gpu kind",
        "memory of a CUDA device: `allocated` to tensors, `reserved` by the process, `used` by all processes, `total`",
    ),
)

PRODUCER = (
    _metric(
        "dllm_redis_up",
        "gauge",
        "",
        "1 while Redis answers; else the other values are the last ones known, for a minute",
    ),
    _metric("dllm_redis_memory_bytes", "gauge", "", "memory that Redis uses"),
    _metric("dllm_redis_memory_limit_bytes", "gauge", "", "its `maxmemory`; 0 for none"),
    _metric(
        "dllm_redis_persistence_ok",
        "gauge",
        "",
        "1 when it keeps its data on a disk and the last write there went well",
    ),
    _metric("dllm_queue_rows", "gauge", "model priority", "prompts that wait"),
    _metric("dllm_workers", "gauge", "model", "living workers that take prompts for the model"),
    _metric("dllm_open_batches", "gauge", "model", "batches that are not published yet"),
    _metric("dllm_open_batch_rows", "gauge", "model state", "their rows: `outstanding`, `done`, `failed`, `cancelled`"),
    _metric(
        "dllm_oldest_batch_age_seconds",
        "gauge",
        "model",
        "how long ago the oldest of them was submitted, or its hours began",
    ),
    _metric("dllm_disk_free_bytes", "gauge", "folder", "room for files of who runs this process"),
    _metric("dllm_disk_size_bytes", "gauge", "folder", "size of the disk"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*WORKER, *PRODUCER)}

_HEAD = """\
# Metrics

Made from `contract/metrics.py` by `python -m contract.metrics > docs/metrics.md`; a test holds that both are equal.

With `metrics_port` set, `worker run` and `producer watch` serve `/metrics` for Prometheus, `/healthz` and `/readyz` at
`metrics_host` (this machine alone unless set). A worker of several devices serves each of its processes at a port of
its own: `metrics_port` and the number of the device in the list, from 0. All is read at the moment of the scrape from
what is there anyway; a worker's values ask nothing of Redis. Beside these there are the usual `process_*`
(`process_resident_memory_bytes`, `process_cpu_seconds_total`, …).

`/healthz` answers 503 when the process should be ended: its loop is stuck (no turn within `step_timeout_s`; for the
producer, 5 minutes). `/readyz` answers 503 while it cannot do its work, with the reasons: the model is loading, Redis
does not answer, outputs cannot be written, it is stopping. Both say so in JSON.

`deploy/grafana.json` is a dashboard of these, `deploy/alerts.yaml` are alarms; their thresholds are told in
[operations.md](operations.md#alarms).
"""


def document() -> str:
    """`docs/metrics.md`."""
    parts = [_HEAD]
    for title, metrics in (("Of a worker", WORKER), ("Of `producer watch`", PRODUCER)):
        parts.append(f"\n## {title}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        for one in metrics:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            parts.append(f"| `{one.name}` | {one.kind} | {labels} | {one.meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(document())
