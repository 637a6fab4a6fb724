"""The page without a browser: who may look and act, what is escaped, what it shows, and that it stays bounded."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.job import Job
from rq.registry import FailedJobRegistry
from starlette.applications import Starlette
from starlette.testclient import TestClient

from contract import sealing, segments
from contract.jobs import ErrorCode, ErrorRow
from contract.ledger import Ledger, Mark
from contract.paths import Folders
from contract.queues import connect, payload, prompts, queue
from contract.settings import ProducerSettings
from producer.dashboard import caching, failing, telling
from producer.dashboard.app import create_app
from producer.gateway import keys
from producer.story import Subject
from tests.conftest import batch_spec, failure_row, waiting_ids

HERE = "http://localhost:8080"
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202egpj.exe\x1b[2J'
Page = Callable[..., TestClient]


@pytest.fixture
def page(producer_settings: Callable[..., ProducerSettings], ledger: Ledger) -> Page:
    """A client of the page with settings of your own, which follows no redirects."""

    def opened(host: str = "127.0.0.1", **values: Any) -> TestClient:
        app = create_app(producer_settings(**{"model": "demo", **values}), ledger, host)
        return TestClient(app, base_url=HERE, follow_redirects=False)

    return opened


@pytest.fixture
def fail(ledger: Ledger, redis: Redis, folders: Folders) -> Callable[..., None]:
    """Let rows of batch `b` fail as a worker does it."""

    def failed(indices: range, message: str = "it failed", batch: str = "b") -> None:
        target = queue(redis, "demo", "normal")
        rows = [failure_row(index, message) for index in indices]
        folder = folders.segments / batch
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{indices.start}.jsonl").write_bytes(b"".join(map(segments.line, rows)))
        with redis.pipeline() as pipe:
            for row in rows:
                job_id = f"{batch}-{row.index}"
                reason = zlib.compress(f"{row.error.code}: {message}".encode())
                pipe.hset(Job.key_for(job_id), mapping={"status": "failed", "exc_info": reason})
                pipe.lrem(redis.names.backlog(batch), 1, job_id)
                pipe.zadd(FailedJobRegistry(queue=target).key, {job_id: time.time() + row.index})
                ledger.mark(pipe, batch, row.index, Mark.FAILED)
            pipe.execute()

    return failed


def token(client: TestClient, path: str = "/") -> str:
    found = re.search(r'name="token" value="([0-9a-f]+)"', client.get(path).text)
    assert found, "no form on the page"
    return found[1]


def post(client: TestClient, path: str, form: dict[str, str], origin: str | None = HERE) -> Any:
    return client.post(path, data=form, headers={"origin": origin} if origin else {})


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_batches_workers_and_queues_are_shown_and_every_table_has_a_caption(
    page: Page, submit: Callable[..., str], fail: Callable[..., None]
) -> None:
    submit(4)
    fail(range(2))
    text = page().get("/").text
    assert 'href="/batches/b"' in text
    assert 'max="4"' in text
    assert "No worker is alive" in text
    assert text.count("<table") == text.count("<caption") > 1
    assert "<svg viewBox" in text
    told = page().get("/batches/b").text
    assert "it failed" in told
    assert "prompt 1" in told
    assert "model_error" in told
    assert '<button aria-label="Retry' not in told


def test_what_comes_from_outside_is_text_and_nothing_else(
    page: Page, submit: Callable[..., str], fail: Callable[..., None], redis: Redis, ledger: Ledger
) -> None:
    """A prompt, an error, a file's name and an address that would each like to be something else."""
    name = '"><script>alert(3)<\u202e'
    submit(1, source=name, model=name)
    fail(range(1), HOSTILE)
    (job,) = prompts(redis, "b", [0])
    assert job
    redis.hset(Job.key_for("b-0"), "data", payload(job.model_copy(update={"prompt": HOSTILE, "id": name})))
    client = page(dashboard_actions=True, model=name)
    for path in (
        "/",
        "/batches/b",
        "/batches/b:0",
        "/failures",
        f"/failures?code={quote(HOSTILE)}",
        f"/batches/{quote(HOSTILE)}",
    ):
        text = client.get(path).text
        scripts = [attrs for tag, attrs in Tags(text).found if tag == "script"]
        assert scripts == [{"src": "/static/page.js", "defer": None}], path
        assert not any(found for _, attrs in Tags(text).found for found in attrs if found.startswith("on")), path
        assert not any(tag == "img" for tag, _ in Tags(text).found), path
        assert "\u202e" not in text, path
        assert "\x1b" not in text, path
    assert "&lt;script&gt;alert(1)" in client.get("/batches/b").text
    assert "\\u202egpj.exe\\u001b[2J" in client.get("/batches/b:0").text
    # The row is found by its index, whatever its id is made of.
    assert post(client, "/retry", {"token": token(client, "/batches/b"), "batch": "b", "index": "0"}).status_code == 303


def test_every_answer_forbids_what_the_page_does_not_need(page: Page) -> None:
    client = page()
    for path in ("/", "/login", "/static/page.js", "/nothing", "/batches/nothing", "/metrics"):
        headers = client.get(path).headers
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "'unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
    text = client.get("/").text
    assert " style=" not in text
    assert "<style" not in text
    assert not re.search(r'(src|href)="(https?:)?//', text)


def test_without_a_key_only_this_machine_may_look(page: Page) -> None:
    assert page().get("/").status_code == 200
    assert page().get("/", headers={"host": "attacker.example"}).status_code == 421
    there = page(host="0.0.0.0")
    assert there.get("/", headers={"accept": "text/html"}).headers["location"] == "/login"


def test_a_key_is_given_once_and_the_cookie_ends_with_it(
    page: Page, producer_settings: Callable[..., ProducerSettings], wait_until: Callable[..., None]
) -> None:
    file = keys.place(producer_settings())
    key = keys.make(file, "alice", None, None)
    client = page()
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert post(client, "/login", {"key": "wrong"}).status_code == 401
    assert post(client, "/login", {"key": key}, origin="http://attacker.example").status_code == 403
    answer = post(client, "/login", {"key": key})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    told = answer.headers["set-cookie"]
    assert all(word in told for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age="))
    assert key not in told
    assert keys.digest(key) not in told
    assert client.get("/").status_code == 200
    cookie = client.cookies["dllm-dashboard"]
    until, _, signature = cookie.partition(".")
    for forged in (f"{int(until) + 1}.{signature}", f"{until}.", f"1.{signature}", "x", f"{'9' * 30}.{signature}"):
        bare = page()
        bare.cookies.set("dllm-dashboard", forged)
        assert bare.get("/").status_code == 401, forged
    stranger = page()  # a process of its own has a secret of its own
    stranger.cookies.set("dllm-dashboard", cookie)
    assert stranger.get("/").status_code == 401
    keys.revoke(file, "alice")
    wait_until(lambda: client.get("/").status_code == 401)


def test_logging_out_forgets_the_cookie(page: Page, producer_settings: Callable[..., ProducerSettings]) -> None:
    key = keys.make(keys.place(producer_settings()), "alice", None, None)
    client = page()
    post(client, "/login", {"key": key})
    assert post(client, "/logout", {"token": "0"}).status_code == 403
    assert post(client, "/logout", {"token": token(client)}).headers["location"] == "/login"
    assert client.get("/").status_code == 401


def test_only_a_form_of_ours_with_actions_allowed_queues_rows_again(
    page: Page, submit: Callable[..., str], fail: Callable[..., None], redis: Redis
) -> None:
    submit(3)
    fail(range(3))
    form = {"batch": "b", "index": "1"}
    only_shows = page()
    assert post(only_shows, "/retry", {**form, "token": "0"}).status_code == 403
    client = page(dashboard_actions=True)
    form["token"] = token(client, "/batches/b")
    assert client.get("/retry").status_code == 405
    assert post(client, "/retry", {**form, "token": "0" * 64}).status_code == 403
    for origin in (None, "null", "http://attacker.example", "http://localhost:8081"):
        assert post(client, "/retry", form, origin).status_code == 403, origin
    assert post(client, "/retry", {**form, "x": "y" * 20_000}).status_code == 413
    assert post(client, "/retry", {**form, **{str(number): "" for number in range(10)}}).status_code == 400
    assert post(client, "/retry", {**form, "code": "nonsense"}).status_code == 400
    assert waiting_ids(redis) == []
    answer = post(client, "/retry", form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/batches/b")
    assert waiting_ids(redis) == ["b-1"]
    assert "1 row queued again" in client.get("/batches/b").text
    post(client, "/retry", {"token": form["token"], "batch": "b", "code": "model_error"})
    assert sorted(waiting_ids(redis)) == ["b-0", "b-1", "b-2"]


def test_a_bearer_of_a_key_may_look_and_not_act(
    page: Page, producer_settings: Callable[..., ProducerSettings], submit: Callable[..., str]
) -> None:
    submit(1)
    key = keys.make(keys.place(producer_settings()), "alice", None, None)
    client = page(dashboard_actions=True)
    client.headers["authorization"] = f"Bearer {key}"
    assert client.get("/batches/b").status_code == 200
    assert post(client, "/retry", {"batch": "b", "token": ""}).status_code == 403


def test_below_another_address_every_link_and_the_cookie_stay_below_it(
    page: Page, producer_settings: Callable[..., ProducerSettings], submit: Callable[..., str]
) -> None:
    submit(1)
    key = keys.make(keys.place(producer_settings()), "alice", None, None)
    outer = Starlette()
    outer.mount("/dashboard", page().app)
    client = TestClient(outer, base_url=HERE, follow_redirects=False)
    answer = post(client, "/dashboard/login", {"key": key})
    assert answer.headers["location"] == "/dashboard/"
    assert "Path=/dashboard" in answer.headers["set-cookie"]
    for path in ("/dashboard/", "/dashboard/batches/b", "/dashboard/batches/b:0", "/dashboard/failures"):
        answer = client.get(path)
        assert answer.status_code == 200
        links = [attrs.get(name) for _, attrs in Tags(answer.text).found for name in ("href", "src", "action")]
        assert all(link.startswith(("/dashboard/", "#", "?")) for link in links if link), path
    assert client.get("/dashboard/static/page.css").status_code == 200


def test_a_million_failed_rows_are_a_page_like_any_other(
    page: Page, ledger: Ledger, redis: Redis, submit: Callable[..., str], fail: Callable[..., None]
) -> None:
    """Bits and commands are counted, not seconds: a page asks for its own rows only."""
    submit(60)
    fail(range(60))
    redis.setrange(ledger.key("b", Mark.FAILED), 10, b"\xff" * 125_000)
    client = page()
    first = client.get("/batches/b").text
    assert first.count('data-key="row b ') == failing.PAGE
    before = redis.info("commandstats")["cmdstat_hget"]["calls"]
    client.get("/batches/b?after=900000", headers={"x-live": "1"})
    asked = redis.info("commandstats")["cmdstat_hget"]["calls"] - before
    assert asked <= 2 * (failing.PAGE + failing.SCANNED)
    following = re.search(r'href="\?after=(\d+)#failed"', first)
    assert following
    assert 'data-key="row b 50"' in client.get(f"/batches/b?after={following[1]}").text


def test_ten_thousand_batches_have_pages(page: Page, ledger: Ledger, redis: Redis) -> None:
    for number in range(60):
        ledger.create(batch_spec(batch=f"b{number:02}", created_at=float(number)))
    redis.zadd(redis.names.key("batches"), {f"gone-{number}": -number for number in range(10_000)})
    client = page()
    assert client.get("/").text.count('data-key="batch ') == 25
    third = client.get("/?page=3").text
    assert 'data-key="batch b09"' in third
    assert 'rel="prev"' in third
    assert client.get("/?page=0").status_code == 400
    assert client.get("/?page=x").status_code == 400
    assert client.get(f"/batches/b09:{10**30}").status_code == 404


def test_a_published_batch_has_its_causes_from_its_summary(
    page: Page, submit: Callable[..., str], fail: Callable[..., None], ledger: Ledger, folders: Folders
) -> None:
    submit(3, unreadable=(2,))
    fail(range(2))
    lines = segments.line(
        ErrorRow(index=2, id="2", line=3, prompt=None, error=failure_row(2, code=ErrorCode.BAD_JSON).error)
    )
    (folders.segments / "b" / "2.jsonl").write_bytes(lines)
    assert sealing.seal("b", ledger, folders)
    batch = ledger.get("b")
    assert batch
    assert failing.causes(batch, ledger, folders) == ([("model_error", 2), ("bad_json", 1)], None)
    text = page(dashboard_actions=True).get("/batches/b").text
    assert "could not be read from its source" in text
    assert text.count('aria-label="Retry row') == 2
    assert "bad_json" in page().get("/batches/b:2").text


def test_one_look_serves_all_who_look_and_a_slow_one_keeps_nobody_waiting(wait_until: Callable[..., None]) -> None:
    looks = []
    slow = caching.Cached(lambda: looks.append(1) or len(looks), fresh_s=60.0, patience_s=20.0)
    assert [slow(), slow(), slow()] == [1, 1, 1]

    def fails() -> int:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        caching.Cached(fails, 1.0, 20.0)()


def test_an_outage_is_told(producer_settings: Callable[..., ProducerSettings]) -> None:
    away = connect("unix:///nowhere")
    away.set_retry(Retry(NoBackoff(), 0))
    client = TestClient(create_app(producer_settings(), Ledger(away), "127.0.0.1"), base_url=HERE)
    answer = client.get("/batches/b")
    assert answer.status_code == 503
    assert "Redis does not answer" in answer.text


def test_a_story_is_as_long_as_a_page_and_read_once(page: Page, submit: Callable[..., str], folders: Folders) -> None:
    submit(1)
    stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    lines = [
        json.dumps(
            {"timestamp": stamp, "event": "prompt_retried", "batch": "b", "index": 0, "reason": f"{HOSTILE} {number}"}
        )
        for number in range(telling.MOST + 1)
    ]
    (folders.logs / "worker-w.jsonl").write_text("\n".join(lines) + "\n")
    client = page()
    text = client.get("/batches/b:0").text
    assert text.count("prompt_retried") == telling.MOST
    assert "producer logs b:0" in text
    assert "<script>alert" not in text
    assert "prompt_retried" not in client.get("/batches/b", headers={"x-live": "1"}).text
    assert telling.story(Subject("b", 0), folders.logs, 0.0, within_s=-1.0) == telling.Story([], False)
