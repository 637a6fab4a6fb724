"""`producer report`: sums of the logs, in bins of time, by worker, model and code."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from producer import review
from producer.cli import app
from producer.review import MOST_WORKERS, Reviewer

START = 1_790_000_000.0


def event(at: float, name: str = "batch_throughput", **fields: Any) -> dict[str, Any]:
    when = datetime.fromtimestamp(START + at, UTC).isoformat().replace("+00:00", "Z")
    usual = {"worker": "w", "model": "demo"} if name == "batch_throughput" else {"worker": "w"}
    return {"timestamp": when, "level": "info", "event": name, **usual, **fields}


def work(at: float, seconds: float, tokens: int, **fields: Any) -> dict[str, Any]:
    usual = {"rows": 4, "forwards": tokens // 2, "row_seconds": 3 * seconds, "queue_wait_s": 1.5, "peak_memory_mb": 7}
    return event(at, seconds=seconds, output_tokens=tokens, **{**usual, **fields})


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    told = [
        work(10, 10, 100),
        work(15, 10, 100, peak_memory_mb=9),
        event(20, "prompt_failed", code="model_error", batch="b", index=1),
        event(21, "prompt_retried", code="model_error", batch="b", index=2),
        event(22, "something_else", code="model_error"),
        work(40, 10, 60, model="other"),
    ]
    (folder / "worker-w.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    (folder / "worker-v.jsonl").write_text(json.dumps(work(30, 5, 50, worker="v")) + "\n")
    submitted = event(5, "rows_submitted", unreadable="0-2,7", batch="b", indices={"b": "0-9"})
    (folder / "producer-h.jsonl").write_text(json.dumps(submitted) + "\n")
    return folder


def test_work_is_summed_over_time_by_worker_by_model_and_by_code(logs: Path) -> None:
    found = review.review(logs, START, START + 48)
    assert found.bin_s == 1
    assert len(found.bins) == 48
    assert (found.total.output_tokens, found.total.rows, found.total.failed, found.total.retried) == (310, 16, 5, 1)
    assert [(one.name, one.output_tokens, one.busy_s) for one in found.workers] == [("w", 260, 25.0), ("v", 50, 5.0)]
    assert found.workers[0].peak_memory_mb == 9
    assert found.workers[0].tokens_per_s == pytest.approx(260 / 25)
    assert found.workers[0].tokens_per_forward == 2.0
    assert found.total.rows_in_flight == pytest.approx(3 * 35 / 30, abs=0.01)
    assert [(one.name, one.output_tokens) for one in found.models] == [("demo", 250), ("other", 60)]
    assert found.failures == {"unreadable": 4, "model_error": 1}
    assert found.retries == {"model_error": 1}
    assert [one.tokens_per_s for one in found.bins[3:17]] == [10.0] * 2 + [20.0] * 5 + [10.0] * 5 + [0.0] * 2
    assert found.bins[20].failed == 1


def test_only_what_lies_in_the_time_asked_for_counts(logs: Path) -> None:
    found = review.review(logs, START + 36, START + 45)
    assert (found.total.output_tokens, found.total.failed) == (24, 0)
    assert found.total.tokens_per_s == pytest.approx(6.0)


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0.001, 300), st.integers(0, 1000)), max_size=20),
    st.sampled_from([7.0, 100.0, 500.0]),
)
def test_the_bins_together_are_the_total(records: list[tuple[float, float, int]], until: float) -> None:
    reviewer = Reviewer(START, START + until)
    for at, seconds, tokens in sorted(records):
        reviewer.add(work(at, seconds, tokens))
    for name in ("tokens", "rows", "row_seconds", "forwards"):
        assert sum(getattr(one, name) for one in reviewer.bins) == pytest.approx(
            getattr(reviewer.total, name), abs=1e-6
        )
    assert reviewer.total.busy_s <= until + 1e-3


def test_memory_is_bounded_however_many_workers_and_days_there_are() -> None:
    reviewer = Reviewer(START, START + 400 * 86_400)
    for number in range(MOST_WORKERS + 5):
        reviewer.add(work(100, 1, 10, worker=f"w{number}"))
    assert len(reviewer.bins) <= review.BINS
    assert len(reviewer.workers) == MOST_WORKERS + 1
    assert reviewer.total.tokens == 10 * (MOST_WORKERS + 5)


def test_it_is_told_drawn_and_written_as_json(logs: Path, tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> str:
        since = datetime.fromtimestamp(START).isoformat()
        result = CliRunner().invoke(app, ["report", "--root", str(tmp_path), "--since", since, *words])
        assert result.exit_code == code, result.output
        return result.output

    shown = run("--plot", str(tmp_path / "out.png"))
    assert "model_error" in shown
    assert "other" in shown
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(run("--json"))["total"]["output_tokens"] == 310
    assert "--plot" in run("--plot", str(tmp_path / "out.nonsense"), code=2)
    for file in logs.iterdir():
        file.unlink()
    assert "the logs hold no work since" in run()
