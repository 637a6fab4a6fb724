"""What earlier versions left behind is read and finished by this one: an upgrade loses nothing.

`versions/` holds a batch as each version that wrote differently left it: eight rows, one answered, one failed, one
waiting to be tried again, one running on a machine that was switched off, one that was no prompt, and three waiting;
all keys of its server, and all files. `python -m tests.versions.record FILE` makes one of the version that it runs in.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from contract import claimed, queues, sealing
from contract.jobs import ErrorCode
from contract.ledger import BatchSpec, BatchState, Ledger
from contract.paths import Folders
from contract.settings import ProducerSettings, WorkerSettings
from producer.claims import Claims
from producer.submitter import submit as submit_claimed
from tests.conftest import completion_row
from worker.intake import Intake
from worker.outputs import Outputs

VERSIONS = sorted((Path(__file__).parent / "versions").glob("*.json"))
OLD_ANSWER = "answer by an old version"


def raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else base64.b64decode(value["base64"])


def restore(recorded: dict[str, Any], redis: Redis) -> None:
    """The server's keys as they were."""
    put: dict[str, Callable[[str, Any], object]] = {
        "string": lambda key, value: redis.set(key, raw(value)),
        "hash": lambda key, value: redis.hset(key, mapping={name: raw(one) for name, one in value.items()}),
        "list": lambda key, value: redis.rpush(key, *map(raw, value)),
        "set": lambda key, value: redis.sadd(key, *value),
        "zset": lambda key, value: redis.zadd(key, dict(value)),
    }
    for key, record in recorded["redis"].items():
        put[record["type"]](key, record["value"])


@pytest.fixture(params=VERSIONS, ids=lambda file: file.stem)
def old(request: pytest.FixtureRequest, folders: Folders) -> dict[str, Any]:
    """What a version left behind; its files are in place, its keys are not."""
    found: dict[str, Any] = json.loads(request.param.read_text(encoding="utf-8"))
    for name, text in found["files"].items():
        file = folders.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return found


def answer_all(
    redis: Redis, ledger: Ledger, settings: WorkerSettings, wait_until: Callable[..., None], complete: Callable[[], Any]
) -> list[int]:
    """Work until `complete`; returns which rows were run, in order."""
    ran: list[int] = []
    with Intake(redis, ledger, settings) as intake, Outputs(settings.folders, ledger, intake.name) as outputs:

        def worked() -> bool:
            rows = intake.take(8)
            assert intake.rejected() == []
            outputs.write([(row.batch, completion_row(row.index, id=row.job.id)) for row in rows])
            intake.finish(rows)
            ran.extend(row.index for row in rows)
            outputs.sealed_if_complete(row.batch for row in rows)
            return bool(complete())

        wait_until(worked)
    return sorted(ran)


def published(folders: Folders, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folders.outputs / name).read_text().splitlines()]


def test_a_batch_that_an_older_version_began_is_finished(
    old: dict[str, Any],
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    worker_settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
) -> None:
    restore(old, redis)
    batch = old["batch"]

    def done() -> bool:
        record = ledger.get(batch)
        assert record is not None
        return record.state is BatchState.DONE

    before = ledger.get(batch)
    assert before is not None
    assert (before.counts.total, before.counts.done, before.counts.failed) == (8, 1, 2)
    assert answer_all(redis, ledger, worker_settings(), wait_until, done) == [2, 3, 5, 6, 7]
    rows = published(folders, "questions.jsonl")
    assert [row["id"] for row in rows] == ["a", "c", "d", "f", "g", "h"]
    assert [row["output"] == OLD_ANSWER for row in rows] == [True, *[False] * 5]
    assert [row["error"]["code"] for row in published(folders, "questions.errors.jsonl")] == [
        ErrorCode.MODEL_ERROR,
        ErrorCode.EMPTY_PROMPT,
    ]
    assert (folders.processed / "questions.jsonl").exists()
    assert sealing.retry(batch, {ErrorCode.MODEL_ERROR}, ledger, folders, redis) == 1
    assert answer_all(redis, ledger, worker_settings(), wait_until, done) == [1]
    assert [row["id"] for row in published(folders, "questions.jsonl")] == list("abcdfgh")


@pytest.mark.parametrize("news", [{"schema_version": 2}, {"colour": "red"}, {"params": {"warmth": 3}}], ids=str)
def test_a_job_of_a_newer_version_says_what_to_upgrade(
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    worker_settings: Callable[..., WorkerSettings],
    news: dict[str, Any],
) -> None:
    """Workers are upgraded first; where they were not, no prompt is lost: it waits among the failed ones."""
    submit(1)
    key = Job.key_for("b-0")
    task, instance, (payload,), named = json.loads(zlib.decompress(redis.hget(key, "data")))
    redis.hset(key, "data", zlib.compress(json.dumps([task, instance, [payload | news], named]).encode()))
    intake = Intake(redis, ledger, worker_settings(name="quiet"))
    assert intake.take(1) == []
    (rejected,) = intake.rejected()
    assert "upgrade" in str(rejected.error)
    assert "`producer retry`" in str(rejected.error)
    assert intake.fail(rejected)
    assert queues.failed_jobs(redis, queues.queue(redis, "demo", "normal"), "b", [0]) == [0]


def test_a_claim_of_an_older_version_is_read_when_the_server_lost_everything(
    old: dict[str, Any], ledger: Ledger, folders: Folders, producer_settings: Callable[..., ProducerSettings]
) -> None:
    (spec,) = Claims(producer_settings(), ledger).pending()
    assert spec.batch == old["batch"]
    assert submit_claimed(spec, ledger, producer_settings())
    record = ledger.get(spec.batch)
    assert record is not None
    assert (record.counts.total, record.counts.failed) == (8, 1)


def test_what_this_version_adds_to_a_record_has_a_default(old: dict[str, Any], folders: Folders) -> None:
    """Or a producer of a version before could not be upgraded while it has batches."""
    spec = claimed.read_manifest(folders.claimed / old["batch"])
    assert spec == BatchSpec.model_validate_json(spec.model_dump_json(exclude_defaults=True))
