"""The page and the metrics below the HTTP service."""

from __future__ import annotations

from collections.abc import Callable

from producer.gateway import keys
from tests.producer.gateway.conftest import Listening


def test_the_page_is_there_when_it_is_asked_for_and_metrics_always(
    listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    bare = listening()
    assert bare.client.get("/dashboard/").status_code == 404
    key = keys.make(keys.place(bare.settings), "alice", None, None)
    service = listening(serve_dashboard=True)
    for path in ("/metrics", "/dashboard/", "/dashboard/metrics"):
        assert service.client.get(path).status_code == 401, path
        allowed = service.client.get(path, headers={"authorization": f"Bearer {key}"})
        assert allowed.status_code == 200, path
        assert ("dllm_redis_up 1.0" in allowed.text) == path.endswith("metrics")
    assert service.client.get("/dashboard").headers["location"].endswith("/dashboard/")
    wait_until(lambda: '"/metrics"' in (service.settings.folders.logs / "audit.jsonl").read_text())
    trail = (service.settings.folders.logs / "audit.jsonl").read_text()
    assert '"/dashboard/"' not in trail
