"""Installations with prefixes of their own share a server and know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis
from rq import Worker

from contract import cancelling, queues
from contract.auditing import Auditor
from contract.errors import SettingsError, UsageError
from contract.ledger import BatchState, Ledger
from contract.names import Connection, Names
from contract.paths import Folders
from contract.queues import connect
from contract.settings import ProducerSettings, WorkerSettings, read
from producer import report
from producer.claims import Claims
from producer.submitter import submit
from tests.conftest import completion_row
from worker.intake import Intake, Taken
from worker.outputs import Outputs


@dataclass(frozen=True, eq=False)
class Installation:
    redis: Connection
    ledger: Ledger
    producer: ProducerSettings
    worker: WorkerSettings

    @staticmethod
    def of(root: Path, url: str, prefix: str) -> Installation:
        root.mkdir()
        redis = connect(url, prefix)
        shared = {"root": root, "redis_url": url, "key_prefix": prefix}
        quick = {"name": "w", "lease_s": 1.0, "scan_s": 0.1, "linger_ms": 0}
        found = Installation(redis, Ledger(redis), ProducerSettings(**shared), WorkerSettings(**shared, **quick))
        found.folders.create()
        return found

    @property
    def folders(self) -> Folders:
        return self.producer.folders

    def submitted(self, rows: int = 3) -> str:
        file = self.producer.root / "same name.txt"
        file.write_text("".join(f"prompt {index} of {self.producer.key_prefix}\n" for index in range(rows)))
        spec = Claims(self.producer, self.ledger).snapshot(file)
        assert submit(spec, self.ledger, self.producer)
        return spec.batch

    def intake(self) -> Intake:
        return Intake(self.redis, self.ledger, self.worker)

    def settled(self, intake: Intake, rows: list[Taken]) -> None:
        with Outputs(self.folders, self.ledger, intake.name) as outputs:
            outputs.write([(row.batch, completion_row(row.index)) for row in rows])
            assert intake.finish(rows) == len(rows)
            outputs.sealed_if_complete(row.batch for row in rows)

    def system(self) -> report.SystemReport:
        return report.system(self.ledger, self.folders, "demo")


@pytest.fixture
def ours(redis: Redis, redis_url: str, tmp_path: Path) -> Installation:
    return Installation.of(tmp_path / "ours", redis_url, "dllm")


@pytest.fixture
def theirs(redis: Redis, redis_url: str, tmp_path: Path) -> Installation:
    return Installation.of(tmp_path / "theirs", redis_url, "acme")


def test_each_sees_and_works_on_its_own_alone(ours: Installation, theirs: Installation) -> None:
    batches = {one: one.submitted() for one in (ours, theirs)}
    assert batches[ours] != batches[theirs]
    for one in batches:
        found = one.system()
        assert [batch.batch for batch in found.batches] == [batches[one]]
        assert {queue.priority: queue.waiting for queue in found.queues} == {"high": 0, "normal": 3, "low": 0}
    with pytest.raises(UsageError, match="no batch"):
        report.find(batches[theirs], ours.ledger)
    assert cancelling.cancel(batches[theirs], ours.ledger, ours.folders).rows == 0

    with ours.intake() as mine, theirs.intake() as other:  # of one name
        assert [worker.name for worker in queues.workers(ours.redis)] == ["w"]
        assert [worker.name for worker in ours.system().workers] == ["w"]
        assert all(worker.serves("demo") for one in batches for worker in queues.workers(one.redis))
        assert sorted(worker.name for worker in Worker.all(connection=ours.redis)) == ["acme@w", "w"]
        taken = {ours: mine.take(10), theirs: other.take(10)}
        for one, intake in ((ours, mine), (theirs, other)):
            assert {row.job.prompt for row in taken[one]} == {
                f"prompt {index} of {one.producer.key_prefix}" for index in range(3)
            }
            assert intake.take(10) == []
            one.settled(intake, taken[one])
    assert all(one.system().workers == [] for one in batches)
    for one, batch in batches.items():
        found_batch = one.ledger.get(batch)
        assert found_batch is not None
        assert found_batch.state is BatchState.DONE


def test_nobody_repairs_what_is_anothers(
    ours: Installation, theirs: Installation, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contract.auditing.CONFIRM_S", 0.0)
    batch = ours.submitted()
    dead = ours.intake()  # never entered: nothing renews its lease
    assert len(dead.take(2)) == 2
    started = queues.queue(ours.redis, "demo", "normal").started_job_registry.key
    wait_until(lambda: ours.redis.zcount(started, 0, ours.ledger.now()) == 2)
    theirs.intake().reconciler.run()
    assert ours.redis.zcard(started) == 2
    ours.intake().reconciler.run()
    assert ours.redis.zcard(started) == 0

    assert ours.redis.delete(ours.redis.names.backlog(batch)) == 1
    assert Auditor(theirs.ledger, theirs.folders).look(thorough=True) == []
    assert [finding.kind for finding in Auditor(ours.ledger, ours.folders).look(thorough=True)] == ["lost_rows"]
    assert ours.ledger.leadership(30).name != theirs.ledger.leadership(30).name


def test_every_key_is_of_the_prefix_or_of_rq(theirs: Installation) -> None:
    """And RQ's are of the prefix by the name of queue, worker or batch in them."""
    batch = theirs.submitted()
    with theirs.intake() as intake:
        rows = intake.take(3)
        keys = {key.decode() for key in theirs.redis.scan_iter()}
        intake.give_back(rows)
    own = {key for key in keys if key.startswith("acme:")}
    shared = {"rq:queues", "rq:workers"}
    assert len(own) > 5
    assert all("acme-demo-" in key or "acme@w" in key or batch in key for key in keys - own - shared), keys


@pytest.mark.parametrize("prefix", ["", "a-b", "a:b", "a b", "a%s", "a*", "ä", "x" * 33])
def test_a_prefix_is_letters_digits_and_underscores(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "worker.yaml").write_text(f"key_prefix: '{prefix}'\n")
    with pytest.raises(SettingsError, match="key_prefix"):
        read(WorkerSettings, {"root": tmp_path})


def test_no_name_of_one_prefix_is_one_of_another() -> None:
    short, long = Names("a"), Names("a_b")
    assert long.queue("demo", "low") == "a_b-demo-low"
    assert short.owns(short.queue("b-demo", "low"))
    assert not short.owns(long.queue("demo", "low"))
    assert not long.owns(short.queue("b-demo", "low"))
    assert short.plain(short.registered("w")) == Names().registered("w") == "w"
    assert short.registered("w") != long.registered("w")
