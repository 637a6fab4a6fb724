"""While the server is away nothing raises, and nothing that ended is forgotten."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from contract import server
from contract.errors import PromptFailure
from contract.jobs import ErrorCode
from contract.ledger import Counts, Ledger, Mark
from contract.queues import connect
from contract.settings import WorkerSettings
from worker.intake import Intake, Taken


class OwnServer:
    """A server of the test's own, which keeps what it was told through a kill."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder / 's'}"
        options = ["--port", "0", "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self._command = [str(server.find_binary()), "--unixsocket", str(folder / "s"), "--dir", str(folder), *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory, wait_until: Callable[..., None]) -> Iterator[OwnServer]:
    own = OwnServer(tmp_path_factory.mktemp("s"))
    own.start()
    yield own
    own.kill()


@pytest.fixture
def redis_url(own_server: OwnServer) -> str:
    return own_server.url


@pytest.fixture
def redis(redis_url: str, wait_until: Callable[..., None]) -> Redis:
    """A connection that does not wait for the server by itself."""
    client = connect(redis_url)
    client.set_retry(Retry(NoBackoff(), retries=0))
    wait_until(lambda: answers(client))
    return client


def answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def take_all(intake: Intake, count: int, seconds: float = 20.0) -> dict[int, Taken]:
    """What comes until there are `count` rows, by index."""
    rows: dict[int, Taken] = {}
    deadline = time.monotonic() + seconds
    while len(rows) < count:
        assert time.monotonic() < deadline
        rows |= {row.index: row for row in intake.take(count, wait_s=1.0)}
    return rows


def test_rows_that_end_while_the_server_is_away_are_recorded_when_it_is_back(
    own_server: OwnServer,
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    worker_settings: Callable[..., WorkerSettings],
) -> None:
    submit(5)
    error = PromptFailure(ErrorCode.MODEL_ERROR, "the model fell over")
    with Intake(redis, ledger, worker_settings(lease_s=30.0)) as intake:
        done, retried, failed, running = intake.take(4)
        own_server.kill()
        assert intake.finish([done]) == 1
        assert intake.retry(retried, error)
        assert intake.fail(failed, error)
        assert intake.take(4) == []
        assert not intake.is_empty()
        own_server.start()
        found = take_all(intake, 2)
        assert {index: row.attempt for index, row in found.items()} == {1: 2, 4: 1}
        assert ledger.marks([("b", index) for index in range(4)]) == [Mark.DONE, None, Mark.FAILED, None]
        assert intake.finish([running, *found.values()]) == 3
        assert ledger.get("b").counts == Counts(total=5, submitted=5, done=4, failed=1)  # type: ignore[union-attr]
        assert intake.is_empty()


class CountingBackoff(NoBackoff):
    """Counts what was asked of a server that was away."""

    asked = 0

    def compute(self, failures: int) -> float:
        self.asked += failures == 1
        return 0


def test_an_absent_server_is_asked_once_at_a_time_however_much_is_to_be_recorded(
    own_server: OwnServer,
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    worker_settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
) -> None:
    submit(20)
    intake = Intake(redis, ledger, worker_settings(lease_s=30.0))
    rows = intake.take(20)
    own_server.kill()
    assert sum(intake.finish([row]) for row in rows) == 20
    backoff = CountingBackoff()
    redis.set_retry(Retry(backoff, retries=1))
    assert intake.take(20) == []
    # RQ's clients may ask for a connection and for its check: what counts is that it is not twenty times.
    assert 1 <= backoff.asked <= 2
    own_server.start()
    wait_until(lambda: answers(redis))
    assert intake.take(20) == []
    assert ledger.get("b").counts == Counts(total=20, submitted=20, done=20, failed=0)  # type: ignore[union-attr]


def test_leases_live_through_an_outage_shorter_than_they_are(
    own_server: OwnServer,
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    worker_settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
) -> None:
    submit(2)
    with Intake(redis, ledger, worker_settings(lease_s=3.0)) as intake:
        rows = intake.take(2)
        own_server.kill()
        own_server.start()
        wait_until(lambda: answers(redis))
        key = rows[0].lease.lane.started
        first = max(score for _, score in redis.zrange(key, 0, -1, withscores=True))
        wait_until(lambda: min(score for _, score in redis.zrange(key, 0, -1, withscores=True)) > first)
        assert intake.lost() == []
        assert intake.finish(rows) == 2


def test_rows_come_back_after_an_outage_longer_than_the_lease(
    own_server: OwnServer,
    redis: Redis,
    ledger: Ledger,
    submit: Callable[..., str],
    worker_settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
) -> None:
    submit(1)
    with Intake(redis, ledger, worker_settings(lease_s=0.3)) as intake:
        (row,) = intake.take(1)
        redis.zadd(row.lease.lane.started, {row.lease.member: 1})
        own_server.kill()
        assert intake.finish([row]) == 1
        own_server.start()
        wait_until(lambda: answers(redis))
        # Whether the row was recorded before its lease was found expired is a race; either way it ends once.
        wait_until(lambda: intake.finish(intake.take(1)) or ledger.marks([("b", 0)])[0])
        assert ledger.get("b").counts == Counts(total=1, submitted=1, done=1, failed=0)  # type: ignore[union-attr]
        assert intake.held() == []
