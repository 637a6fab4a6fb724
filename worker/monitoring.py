"""What a worker tells at its port: metrics at the moment of a scrape, whether it is alive, whether it can work.

Reads plain values that the loop and the heartbeat keep anyway; asks neither Redis nor the loop, and waits for nobody.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from contract.metrics import METRICS
from contract.monitoring import Family, Monitor, family, registry_of
from contract.settings import WorkerSettings
from worker.intake import Intake
from worker.model import Model
from worker.progress import Phase, Progress
from worker.steptimes import PHASES
from worker.throughput import TokenRate


@dataclass(eq=False)  # the registry keeps it in a set
class Standing(Collector):
    """One worker as others see it. `model` and `intake` are there when they have been opened."""

    config: WorkerSettings
    progress: Progress
    worker: str
    model: Model | None = None
    intake: Intake | None = None
    _rate: TokenRate = field(default_factory=TokenRate)

    def monitor(self) -> contextlib.AbstractContextManager[object]:
        """The port, where the settings name one."""
        if self.config.metrics_port is None:
            return contextlib.nullcontext()
        return Monitor(self.config, registry_of(self), self.stuck, self.unready)

    # Health

    def stuck(self) -> list[str]:
        """Why the process should be ended. Loading and publishing take as long as they take."""
        still_s = time.monotonic() - self.progress.turned_at
        if self.progress.phase is Phase.WORKING and still_s > self.config.step_timeout_s:
            return [f"the loop has made no turn for {still_s:.0f} s"]
        return []

    def unready(self) -> list[str]:
        """Why it cannot do its work now."""
        found = self.stuck()
        if self.progress.phase in (Phase.LOADING, Phase.STOPPING):
            found.append(f"the worker is {self.progress.phase}")
        if self.intake and (silent_s := time.monotonic() - self.intake.beaten_at) > self.config.lease_s:
            found.append(f"Redis has not answered for {silent_s:.0f} s")
        if self.progress.disk_full or not os.access(self.config.folders.segments, os.W_OK):
            found.append(f"{self.config.folders.segments} cannot be written")
        return found

    # Metrics

    def collect(self) -> Iterable[Family]:
        """Called at each scrape, by the thread that answers it."""
        progress = self.progress
        yield family("dllm_worker_ready", [((), float(not self.unready()))])
        yield family("dllm_rows_in_flight", [((), progress.rows)])
        yield family("dllm_output_tokens_per_second", [((), self._rate.of(progress.tokens, time.monotonic()))])
        for name, total in (
            ("dllm_rows_finished_total", progress.finished),
            ("dllm_output_tokens_total", progress.tokens),
            ("dllm_prompt_tokens_total", progress.prompt_tokens),
            ("dllm_row_forwards_total", progress.forwards),
        ):
            yield family(name, [((), total)])
        yield family("dllm_rows_failed_total", [((code,), count) for code, count in dict(progress.failures).items()])
        yield self._step_times()
        if self.intake:
            yield family("dllm_row_retries_total", [((), self.intake.tally["retried"])])
            yield family("dllm_leases_lost_total", [((), self.intake.tally["lost"])])
        if self.model:
            yield from self._of_the_model(self.model)

    def _of_the_model(self, model: Model) -> Iterator[Family]:
        engine = model.engine
        what = [self.worker, *(model.place()[name] for name in ("model", "device", "dtype", "quantize"))]
        yield family("dllm_worker_info", [(what, 1.0)])
        yield family("dllm_rows_in_flight_limit", [((), engine.max_rows)])
        positions = [(("computed",), engine.stats.prefill_positions), (("reused",), engine.reused_positions)]
        yield family("dllm_prompt_positions_total", positions)
        with contextlib.suppress(RuntimeError):  # a device that is lost tells nothing
            yield family("dllm_gpu_memory_bytes", model.device_memory().items())

    def _step_times(self) -> HistogramMetricFamily:
        metric, times = METRICS["dllm_step_seconds"], self.progress.times
        found = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for phase in PHASES:
            found.add_metric([phase], times.buckets(phase), times.sums[phase])
        return found
