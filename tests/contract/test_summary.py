"""The summary of a batch adds up, and holds no more memory for more rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from contract import sealing
from contract.errors import PromptFailure
from contract.jobs import Completion, ErrorCode, ErrorRow, Usage
from contract.ledger import Batch, BatchState, Counts, Ledger, Prices
from contract.paths import Folders
from contract.sampling import SamplingParams
from contract.segments import SegmentWriter
from contract.settings import WorkerSettings
from contract.summary import Summary, Times
from tests.conftest import batch_spec, completion_row, failure_row
from worker.intake import Intake


def added(*rows: Completion | ErrorRow) -> Summary:
    summary = Summary()
    for row in rows:
        summary.add(row.model_dump(mode="json"))
    return summary


def record(started_at: float | None = 110.0, ended_at: float | None = 120.0, **values: Any) -> Batch:
    spec = batch_spec(created_at=100.0, **values)
    counts = Counts(total=0, submitted=0, done=0, failed=0)
    return Batch(spec=spec, state=BatchState.RUNNING, counts=counts, started_at=started_at, ended_at=ended_at)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    times = Times()
    for seconds in range(1, 101):
        times.add(seconds / 100)
    assert times.percentiles() == {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    assert Times().percentiles() is None
    one = Times()
    one.add(0.0)
    assert one.percentiles() == {"p50": 0.0, "p95": 0.0, "p99": 0.0}


def test_percentiles_of_many_different_times_are_right_to_three_digits_in_little_memory() -> None:
    numbers = random.Random(3)
    values = [numbers.lognormvariate(2, 3) for _ in range(100_000)]
    times = Times()
    for seconds in values:
        times.add(seconds)
    assert len(times._counts) < 12_000
    ordered = sorted(values)
    for percent, found in zip((50, 95, 99), (times.percentiles() or {}).values(), strict=True):
        assert found == pytest.approx(ordered[percent * 1000 - 1], rel=0.006)


def test_rows_tokens_times_and_codes_add_up() -> None:
    cancelled = failure_row(3, code=ErrorCode.CANCELLED)
    rows = [completion_row(0), completion_row(1, finish_reason="length", worker="v"), failure_row(2), cancelled]
    told = added(*rows).document(record(params=SamplingParams(seed=7)), now=999.0)
    assert told["rows"] == {"total": 4, "done": 2, "failed": 1, "cancelled": 1}
    assert told["errors"] == {"cancelled": 1, "model_error": 1}
    assert told["finish_reasons"] == {"length": 1, "stop": 1}
    assert told["tokens"] == {"prompt": 6, "completion": 4}
    times = {"submitted_at": 100.0, "started_at": 110.0, "finished_at": 120.0, "wall_s": 20.0, "running_s": 10.0}
    assert told["time"] == times
    assert (told["tokens_per_s"], told["tokens_per_forward"]) == (0.4, 0.5)
    assert told["queued_s"] == {"p50": 0.1, "p95": 0.1, "p99": 0.1}
    assert told["denoise_s"]["p99"] == 0.2
    assert told["workers"] == 2
    assert told["params"]["seed"] == 7
    assert {"dllm-batch", "schema", "python"} <= told["versions"].keys() | {"dllm-batch"}
    assert "estimated_cost" not in told


def test_a_batch_without_answers_has_no_rates() -> None:
    told = added(failure_row(0)).document(record(started_at=None, ended_at=None), now=130.0)
    assert (told["tokens_per_s"], told["tokens_per_forward"], told["queued_s"]) == (None, None, None)
    assert (told["time"]["started_at"], told["time"]["wall_s"]) == (None, 30.0)


def test_cost_is_estimated_from_hours_of_workers_and_from_tokens() -> None:
    usage = Usage(prompt_tokens=1_000_000, completion_tokens=500_000)
    rows = [completion_row(0, usage=usage), completion_row(1, usage=usage, worker="v")]
    prices = Prices(per_hour=3.6, per_million_input=1.0, per_million_output=2.0)
    told = added(*rows).document(record(prices=prices), now=0.0)
    assert told["estimated_cost"] == {"worker_hours": 0.005556, "by_hours": 0.02, "by_tokens": 4.0}
    told = added(*rows).document(record(prices=Prices(per_million_output=2.0)), now=0.0)
    assert told["estimated_cost"] == {"by_tokens": 2.0}


def test_published_rows_that_somebody_edited_do_not_keep_a_batch_from_being_published() -> None:
    summary = Summary()
    summary.add({"id": "a", "output": "x", "usage": "none", "timing": None, "denoise": {"forwards": "many"}})
    assert summary.document(record(), now=0.0)["tokens"] == {"prompt": 0, "completion": 0}


def test_the_ledger_knows_when_a_batchs_rows_began_and_ended_and_their_tokens(
    submit: Callable[..., str],
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    batch = submit(3, prices=Prices(per_hour=1.0))
    before = ledger.get(batch)
    assert before is not None
    assert (before.started_at, before.ended_at, before.output_tokens) == (None, None, 0)
    intake = Intake(redis, ledger, worker_settings(name="w"))
    first, second, third = intake.take(3)
    began = ledger.get(batch)
    assert began is not None
    assert began.started_at == pytest.approx(ledger.now(), abs=5)
    with SegmentWriter(folders, batch, "w") as segment:
        segment.append([completion_row(0), completion_row(1), failure_row(2)])
    intake.finish([first, second], {first.job.job_id: 5, second.job.job_id: 7})
    intake.finish([first], {first.job.job_id: 5})
    intake.fail(third, PromptFailure(ErrorCode.MODEL_ERROR, "it failed"))
    ended = ledger.get(batch)
    assert ended is not None
    assert ended.output_tokens == 12
    assert ended.started_at == began.started_at
    assert ended.ended_at is not None
    assert ended.ended_at >= (ended.started_at or 0)
    assert sealing.seal(batch, ledger, folders)
    told = json.loads((folders.outputs / "b.summary.json").read_text())
    assert told["rows"] == {"total": 3, "done": 2, "failed": 1, "cancelled": 0}
    assert told["time"]["finished_at"] == pytest.approx(ended.ended_at, abs=0.001)
    assert told["estimated_cost"].keys() == {"worker_hours", "by_hours"}
