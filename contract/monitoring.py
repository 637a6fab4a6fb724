"""A port at which others see how a process stands: `/metrics`, `/healthz`, `/readyz`.

A thread of its own answers, so that it does so while the process works, and stops with it. What is told is decided by
who opens it; nothing here knows workers or queues.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from contract import logs
from contract.errors import SettingsError
from contract.metrics import METRICS
from contract.settings import Settings

Problems = Callable[[], Sequence[str]]
"""What is wrong now; nothing when all is well."""
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
PATIENCE_S = 10.0
"""A client that says nothing for so long is left."""


def family(name: str, values: Iterable[tuple[Sequence[str], float]]) -> CounterMetricFamily | GaugeMetricFamily:
    """A counter or gauge of `contract.metrics`, whichever it is there, with a value for each set of labels."""
    metric = METRICS[name]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    found = kind(name, metric.meaning, labels=metric.labels)
    for labels, value in values:
        found.add_metric(labels, value)
    return found


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """What is asked at each scrape: `collectors`, and how the process itself stands."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    for one in collectors:
        registry.register(one)
    return registry


class Monitor:
    """The port, open while inside. Raises SettingsError on entry when it cannot be had."""

    def __init__(self, settings: Settings, registry: CollectorRegistry, live: Problems, ready: Problems) -> None:
        assert settings.metrics_port is not None
        self._address = (settings.metrics_host, settings.metrics_port)
        self._registry = registry
        self._checks = {"/healthz": live, "/readyz": ready}
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Monitor:
        host, port = self._address
        try:
            self._server = _Server(self._address, self._handler())
        except OSError as error:
            raise SettingsError(
                f"metrics_port = {port} at {host} cannot be had ({error.strerror}): choose another, or end who has it"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        logs.get().info("metrics_opened", address=f"http://{host}:{port}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry, checks = self._registry, self._checks

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, kind = choose_encoder(self.headers.get("Accept", ""))
                    self._answer(200, kind, encode(registry))
                elif path in checks:
                    problems = list(checks[path]())
                    body = json.dumps({"ok": not problems, "problems": problems}).encode() + b"\n"
                    self._answer(503 if problems else 200, "application/json", body)
                else:
                    self._answer(404, "text/plain", b"/metrics, /healthz, /readyz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Probes come every few seconds."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's trouble."""
