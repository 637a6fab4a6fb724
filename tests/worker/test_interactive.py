"""Requests on a real server and tiny real models: first at any step, streamed, withdrawn, answered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from contract import interactive, queues
from contract.auditing import Auditor
from contract.interactive import Reply, ask, capacity, is_interactive, new_request, replies, stream_of, withdraw
from contract.jobs import PromptJob
from contract.ledger import Cursor, Ledger
from contract.names import Connection, Names
from contract.paths import Folders
from contract.queues import connect, enqueuing
from contract.sampling import SamplingParams
from contract.settings import WorkerSettings
from producer import report
from tests.canvas_checkpoint import diffusion_gemma
from tests.checkpoints import llada, llama_block, sdar, wedlm
from tests.conftest import batch_spec, prompt_job, waiting_ids
from tests.worker.test_intake_outage import OwnServer, answers
from tests.worker.test_loop import Faulty
from worker.engine import Engine
from worker.intake import Intake
from worker.loop import Loop
from worker.model import Model, open_model
from worker.outputs import Outputs

NAMES = Names()
SERVICE = stream_of(NAMES, "service")
KINDS = [llama_block, sdar, llada, wedlm, diffusion_gemma]
SHORT = SamplingParams(max_new_tokens=12, seed=1)
LONG = SamplingParams(max_new_tokens=200, threshold=1.0)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Model]:
    """The model that a function writes, loaded once."""
    known: dict[Any, Model] = {}

    def model(write: Any) -> Model:
        if write not in known:
            folder: Path = write(tmp_path_factory.mktemp(write.__name__) / "tiny")
            known[write] = open_model(WorkerSettings(model=str(folder), dtype="float32", threads=1, max_rows=2))
        return known[write]

    return model


@pytest.fixture
def model(opened: Callable[[Any], Model]) -> Model:
    return opened(llama_block)


@pytest.fixture
def settings(worker_settings: Callable[..., WorkerSettings]) -> Callable[..., WorkerSettings]:
    return lambda **values: worker_settings(**{"model": "tiny", "lease_s": 30.0, **values})


@pytest.fixture
def at_work(
    redis: Redis, ledger: Ledger, folders: Folders, settings: Callable[..., WorkerSettings], model: Model
) -> Callable[..., Any]:
    """A loop to be turned by hand."""

    @contextmanager
    def working(model: Model = model, **values: Any) -> Iterator[Loop]:
        with Intake(redis, ledger, settings(**values)) as intake, Outputs(folders, ledger, intake.name) as outputs:
            loop = Loop(intake, model, outputs, grace_s=0.0, log=structlog.get_logger())
            try:
                yield loop
            finally:
                for job_id in list(model.engine.active()):
                    model.engine.remove(job_id)

    return working


def call(redis_url: str, work: Callable[[AsyncRedis], Any]) -> Any:
    """Run a coroutine of the service's side on a connection of its own."""

    async def called() -> Any:
        async with AsyncRedis.from_url(redis_url) as redis:
            return await work(redis)

    return asyncio.run(called())


@pytest.fixture
def asked(redis_url: str) -> Callable[..., str]:
    """Ask for an answer to `prompt`; returns the request."""

    def ask_for(prompt: str = "why?", count: int = 1, params: SamplingParams = SHORT, **values: Any) -> str:
        request = new_request()
        common = {"batch": request, "line": 1, "prompt": prompt, "params": params, "submitted_at": 0.0, **values}
        jobs = [PromptJob(**{"index": n, "id": str(n), "reply_to": SERVICE, **common}) for n in range(count)]
        call(redis_url, lambda redis: ask(redis, NAMES, "tiny", jobs))
        return request

    return ask_for


def told(redis: Redis, request: str, choice: int = 0) -> list[Reply]:
    """What the service was told of a choice."""
    found = [(fields.get(b"kind"), fields) for _, fields in redis.xrange(SERVICE)]
    every = [
        Reply(fields[b"request"].decode(), int(fields[b"choice"]), kind.decode(), json.loads(fields[b"data"]))
        for kind, fields in found
    ]
    return [reply for reply in every if (reply.request, reply.choice) == (request, choice)]


def turn(loop: Loop) -> None:
    loop.take()
    loop.step()
    loop.settle()


def run(loop: Loop, redis: Redis, request: str, choice: int = 0) -> list[Reply]:
    """Turn the loop until the choice has its last reply."""
    for _ in range(500):
        turn(loop)
        found = told(redis, request, choice)
        if found and found[-1].kind in ("done", "failed"):
            return found
    raise AssertionError("no answer")


def left_of(redis: Redis, request: str) -> list[str]:
    """Keys that name the request; the replies' stream and the bell expire."""
    assert redis.ttl(SERVICE) > 0
    assert redis.ttl(interactive.bell(NAMES, "tiny")) > 0
    for kind in ("started", "scheduled", "failed"):
        registry = getattr(queues.queue(redis, "tiny", "interactive"), f"{kind}_job_registry")  # type: ignore[arg-type]
        assert not [member for member in redis.zrange(registry.key, 0, -1) if request.encode() in member]
    assert not any(request.encode() in b"".join(redis.smembers(key)) for key in redis.keys("rq:*executions*s"))
    return [key.decode() for key in redis.keys(f"*{request}*")]


def test_ids_of_requests_are_no_batches() -> None:
    assert is_interactive(new_request())
    assert not is_interactive("chat-1a2b3c4d")


def test_a_request_enters_an_engine_that_is_full_of_batches(
    redis: Redis,
    submit: Callable[..., str],
    asked: Callable[..., str],
    at_work: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    submit(6, model="tiny")
    with at_work() as loop:
        turn(loop)
        full = list(loop.running)
        assert len(full) == 2
        request = asked(count=2)
        assert queues.depths(redis, "tiny")["interactive"] == 2  # type: ignore[arg-type]
        wait_until(loop.intake.rung)
        turn(loop)
        assert list(loop.running) == [*full, f"{request}-0", f"{request}-1"]
        assert [reply.kind for reply in run(loop, redis, request, 1)] == ["started", "done"]
        assert run(loop, redis, request, 0)[-1].data["usage"]["completion_tokens"] <= 12
    assert left_of(redis, request) == []


def test_requests_are_taken_before_everything_that_is_urgent_too(
    submit: Callable[..., str], asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    submit(3, model="tiny", priority="high")
    request = asked()
    with at_work() as loop:
        assert [row.batch for row in loop.intake.take(2)] == [request, "b"]


def test_a_full_engine_does_not_look_at_the_queue_unless_somebody_rang(
    redis: Redis,
    ledger: Ledger,
    folders: Folders,
    model: Model,
    settings: Callable[..., WorkerSettings],
    submit: Callable[..., str],
    asked: Callable[..., str],
) -> None:
    def looks() -> int:
        return int(redis.info("commandstats")["cmdstat_evalsha"]["calls"])

    submit(4, model="tiny")
    intake = Intake(redis, ledger, settings())  # never entered: nothing but the loop asks the server
    with Outputs(folders, ledger, "w") as outputs:
        loop = Loop(intake, model, outputs, grace_s=0.0, log=structlog.get_logger())
        loop.take()
        before = looks()
        for _ in range(3):
            loop.take()
        assert (len(loop.running), looks()) == (2, before)
        request = asked()
        intake._listen()
        loop.take()
        loop.take()
        assert (len(loop.running), looks()) == (3, before + 1)
        for job_id in loop.running:
            assert model.engine.remove(job_id)
    assert redis.exists(f"rq:job:{request}-0")


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_what_is_streamed_is_the_output(
    write: Any, opened: Callable[[Any], Model], redis: Redis, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    params = SamplingParams(max_new_tokens=40, seed=3, temperature=1.0)
    with at_work(opened(write)) as loop:
        plain = run(loop, redis, asked(params=params))
        request = asked(params=params, stream=True)
        streamed = run(loop, redis, request)
    assert [reply.kind for reply in plain] == ["started", "done"]
    blocks = [reply.data for reply in streamed if reply.kind == "block"]
    assert blocks
    text = ""
    for block in blocks:
        assert block["at"] == len(text)
        assert block["text"]
        text += block["text"]
    output = streamed[-1].data["output"]
    assert output.startswith(text)
    assert streamed[-1].data["output"] == plain[-1].data["output"]
    assert [block["tokens"] for block in blocks] == sorted(block["tokens"] for block in blocks)
    assert left_of(redis, request) == []


def test_a_stop_text_ends_the_answer_of_requests_and_of_batch_rows(
    redis: Redis, ledger: Ledger, folders: Folders, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    params = SamplingParams(max_new_tokens=60, seed=3, temperature=1.0)
    ledger.create(batch_spec(model="tiny"))
    with at_work() as loop:
        whole = run(loop, redis, asked(params=params))[-1].data
        stop = whole["output"][9:11]
        stopped = params.model_copy(update={"stop": (stop,)})
        ended = run(loop, redis, asked(params=stopped, stream=True))
        row = enqueuing(queues.queue(redis, "tiny", "normal"), [prompt_job("b", 0, prompt="why?", params=stopped)])
        assert ledger.advance("b", Cursor(), Cursor(offset=1, line=2, index=1), [], row, last=True)
        while ledger.open_batches():
            turn(loop)
    answer = ended[-1].data
    assert answer["output"] == whole["output"][: whole["output"].index(stop)]
    assert answer["finish_reason"] == "stop"
    assert answer["params"]["stop"] == [stop]
    assert answer["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]
    assert answer["denoise"]["forwards"] < whole["denoise"]["forwards"]
    shown = "".join(reply.data["text"] for reply in ended if reply.kind == "block")
    assert answer["output"].startswith(shown)
    published = json.loads((folders.outputs / "b.jsonl").read_text())
    for name in ("output", "finish_reason", "usage", "denoise", "params"):
        assert published[name] == answer[name]


def test_what_is_withdrawn_leaves_the_queue_and_the_engine(
    redis: Redis,
    redis_url: str,
    asked: Callable[..., str],
    at_work: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    with at_work() as loop:
        running = asked(count=2, params=LONG)
        turn(loop)
        assert len(loop.running) == 2
        waiting = asked()
        for request, count in ((running, 2), (waiting, 1)):
            call(redis_url, lambda redis, one=request, many=count: withdraw(redis, NAMES, "tiny", one, many))
        wait_until(lambda: loop.take() or not loop.running)  # long before a heartbeat
        assert loop.model.engine.active() == []
        turn(loop)
    assert [reply.kind for reply in told(redis, running)] == ["started"]
    assert told(redis, waiting) == []
    assert left_of(redis, running) == left_of(redis, waiting) == []


def test_what_was_withdrawn_while_it_was_being_taken_does_not_start(
    redis: Redis, redis_url: str, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    request = asked()
    with at_work() as loop:
        loop.intake._note_withdrawn(request)  # the bell is heard before what was taken is held
        assert loop.intake.take(2) == []
        assert loop.intake.held() == []


def test_a_request_whose_service_is_gone_is_dropped(
    redis: Redis, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    request = asked(count=2)
    redis.delete(SERVICE)
    with at_work() as loop:
        turn(loop)
        assert loop.running == {}
    assert redis.keys(f"*{request}*") == []
    assert queues.depths(redis, "tiny")["interactive"] == 0  # type: ignore[arg-type]


def test_a_row_whose_worker_died_begins_anew_and_tells_so(
    redis: Redis, ledger: Ledger, settings: Callable[..., WorkerSettings], asked: Callable[..., str], at_work: Any
) -> None:
    request = asked(stream=True)
    dead = Intake(redis, ledger, settings(name="dead"))  # never entered: no heartbeat, and it gives nothing back
    (row,) = dead.take(1)
    redis.zadd(row.lease.lane.started, {row.lease.member: 1})
    with at_work(name="alive", scan_s=0.05) as loop:
        replies = run(loop, redis, request)
    assert (replies[0].kind, replies[0].data) == ("again", {"worker": "alive", "attempt": 2})
    assert replies[-1].kind == "done"
    assert [reply.kind for reply in replies].count("done") == 1
    assert dead.answer([(row, {"kind": "done"})]) == 0  # it woke up: the row is not its any more
    assert told(redis, request) == replies
    assert left_of(redis, request) == []


def test_a_worker_that_is_stopped_gives_requests_back_and_another_answers(
    redis: Redis, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    request = asked(params=LONG.model_copy(update={"max_new_tokens": 40}))
    with at_work(name="first") as loop:
        turn(loop)
        loop.stop()
        loop.wind_down()
        assert waiting_ids(redis, "tiny", "interactive") == [f"{request}-0"]
        assert not redis.exists(NAMES.batch(request, "starts"))
    with at_work(name="second") as loop:
        found = run(loop, redis, request)
    assert [(reply.kind, reply.data.get("worker")) for reply in found] == [
        ("started", "first"),
        ("started", "second"),
        ("done", "second"),
    ]


def test_a_request_that_fails_is_answered_and_leaves_nothing(
    redis: Redis, model: Model, asked: Callable[..., str], at_work: Callable[..., Any]
) -> None:
    late = asked(params=LONG.model_copy(update={"timeout_s": 1e-6}))
    empty = asked(prompt=" ")
    with at_work() as loop:
        codes = [run(loop, redis, request)[-1].data["error"]["code"] for request in (late, empty)]
    wrong = asked()
    with at_work(replace(model, engine=Faulty(model.engine, f"{wrong}-0")), max_attempts=2) as loop:
        *_, first, last = run(loop, redis, wrong)
    assert codes == ["deadline_exceeded", "empty_prompt"]
    assert (first.kind, last.kind, last.data["error"]["code"]) == ("again", "failed", "model_error")
    for request in (late, empty, wrong):
        assert left_of(redis, request) == []


def test_the_youngest_row_of_a_batch_makes_way_where_memory_is_short(
    redis: Redis,
    model: Model,
    submit: Callable[..., str],
    asked: Callable[..., str],
    at_work: Callable[..., Any],
    wait_until: Callable[..., None],
) -> None:
    engine = model.engine
    assert isinstance(engine, Engine)
    need = engine.memory.need(300)
    small = Engine(engine.spec, engine.runner.decoder, max_rows=2, memory_budget=2 * need, urgent_rows=1)
    submit(3, model="tiny")  # 256 tokens of answer each
    with at_work(replace(model, engine=small)) as loop:
        turn(loop)
        assert list(loop.running) == ["b-0", "b-1"]
        request = asked(params=SamplingParams(max_new_tokens=140))
        wait_until(loop.intake.rung)
        loop.take()
        assert set(loop.running) == {"b-0", f"{request}-0"}
        assert waiting_ids(redis, "tiny")[0] == "b-1"
        assert redis.hkeys(NAMES.batch("b", "starts")) == [b"0"]


def test_who_looks_after_batches_does_not_stumble_over_requests(
    redis: Redis, ledger: Ledger, folders: Folders, settings: Callable[..., WorkerSettings], asked: Callable[..., str]
) -> None:
    request = asked(count=3)
    with Intake(redis, ledger, settings()) as intake:
        (row,) = intake.take(1)
        assert Auditor(ledger, folders).look(thorough=True) == []
        intake.reconciler.run()
        assert waiting_ids(redis, "tiny", "interactive") == [f"{request}-1", f"{request}-2"]
        shown = report.system(ledger, folders, "tiny")
        assert next((one.priority, one.waiting) for one in shown.queues) == ("interactive", 2)
        assert shown.batches == []
        assert ledger.open_batches() == []
        assert intake.held() == [row]


def test_what_the_workers_can_do_is_known(
    redis: Redis, redis_url: str, ledger: Ledger, settings: Callable[..., WorkerSettings], asked: Callable[..., str]
) -> None:
    none = call(redis_url, lambda redis: capacity(redis, NAMES, "tiny"))
    assert (none.workers, none.rows) == (0, 0)
    vitals = lambda: {"most_rows": 6, "tokens_per_s": 1.5}  # noqa: E731
    with Intake(redis, ledger, settings(name="a"), vitals) as one, Intake(redis, ledger, settings(name="b"), vitals):
        asked(count=3)
        assert len(one.take(2)) == 2
        found = call(redis_url, lambda redis: capacity(redis, NAMES, "tiny"))
    assert (found.workers, found.rows, found.running, found.waiting, found.tokens_per_s) == (2, 12, 2, 1, 3.0)


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory, wait_until: Callable[..., None]) -> Iterator[OwnServer]:
    own = OwnServer(tmp_path_factory.mktemp("s"))
    own.start()
    with impatient(own) as client:
        wait_until(lambda: answers(client))
    yield own
    own.kill()


@contextmanager
def impatient(server: OwnServer) -> Iterator[Connection]:
    """A connection that does not wait for the server by itself."""
    client = connect(server.url)
    client.set_retry(Retry(NoBackoff(), retries=0))
    try:
        yield client
    finally:
        client.close()


def test_a_reply_waits_for_a_server_that_is_away(
    own_server: OwnServer,
    folders: Folders,
    model: Model,
    settings: Callable[..., WorkerSettings],
    wait_until: Callable[..., None],
) -> None:
    request = new_request()
    job = {"batch": request, "index": 0, "line": 1, "id": "0", "prompt": "why?", "submitted_at": 0.0}
    whole = PromptJob(**job, params=SHORT, reply_to=SERVICE, stream=True)
    call(own_server.url, lambda redis: ask(redis, NAMES, "tiny", [whole]))
    with impatient(own_server) as redis:
        ledger = Ledger(redis)
        with Intake(redis, ledger, settings()) as intake, Outputs(folders, ledger, "w") as outputs:
            loop = Loop(intake, model, outputs, grace_s=0.0, log=structlog.get_logger())
            loop.take()
            own_server.kill()
            while loop.running:
                loop.step()
                loop.settle()
            own_server.start()
            wait_until(lambda: answers(redis))
            wait_until(lambda: turn(loop) or told(redis, request))
            assert [reply.kind for reply in told(redis, request)] == ["done"]  # it says it all
            assert intake.held() == []
            assert left_of(redis, request) == []


def test_replies_are_read_and_taken_away_and_an_outage_only_delays_them(own_server: OwnServer) -> None:
    reply = Reply(new_request(), 0, "started", {"worker": "é"})

    async def sent(redis: AsyncRedis, one: Reply) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                if await redis.xadd(SERVICE, interactive.fields_of(one), nomkstream=True):
                    return
            await asyncio.sleep(0.01)

    async def read() -> list[Reply]:
        async with AsyncRedis.from_url(own_server.url) as redis:
            reader = replies(redis, NAMES, "service")
            first = asyncio.ensure_future(anext(reader))
            await sent(redis, reply)
            found = [await first]
            second = asyncio.ensure_future(anext(reader))
            own_server.kill()
            own_server.start()
            await sent(redis, replace(reply, choice=1))
            found.append(await second)
            assert await redis.xlen(SERVICE) <= 2
            assert 0 < await redis.ttl(SERVICE) <= interactive.LIFE_S
            return found

    assert asyncio.run(read()) == [reply, replace(reply, choice=1)]
