"""OpenAI's own client against `producer serve` and a worker, processes of their own: only the base URL is another."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from contract.settings import ProducerSettings
from producer.gateway import keys
from tests.e2e.system import START_S, System
from tests.servers import free_port

HELLO = [{"role": "user", "content": "hello there"}]
DRAWN: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 32, "temperature": 1.0}


class Served(System):
    """A root with a service on a port of its own; a worker comes when it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        file = keys.place(ProducerSettings(root=root))
        self.key, self.slow_key = keys.make(file, "alice", None, None), keys.make(file, "bob", 1, None)
        self.port = free_port()
        self.service = self.start("producer", "serve", "--port", str(self.port))

    def says(self, path: str) -> int:
        """The status of an address; 0 while nobody listens."""
        try:
            return httpx2.get(f"http://127.0.0.1:{self.port}{path}").status_code
        except httpx2.TransportError:
            return 0

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key or self.key, max_retries=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    opened = Served(tmp_path)
    try:
        yield opened
    finally:
        opened.end()


def test_openais_client_needs_another_base_url_and_nothing_else(
    served: Served, wait_until: Callable[..., None]
) -> None:
    wait_until(lambda: served.says("/healthz") == 200, START_S)
    with served.client() as client:
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(**DRAWN)
        assert (refused.value.status_code, refused.value.code) == (503, "no_worker")
        served.start("worker", "run", "--max-rows", "8")
        wait_until(lambda: served.says("/readyz") == 200, START_S)
        chat_seed_choices_stop_and_stream(client)
        a_file_becomes_a_batch_and_its_outputs(client, wait_until)
        errors_are_those_of_the_client(served, client)
        what_is_under_way_is_sent_to_its_end(served, client)


def content(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def chat_seed_choices_stop_and_stream(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**DRAWN, seed=5)
    assert content(first)
    assert first.usage is not None
    assert 0 < first.usage.completion_tokens <= 32
    assert first.model_extra is not None
    assert first.model_extra["denoise"]["forwards"] > 0
    assert content(client.chat.completions.create(**DRAWN, seed=5)) == content(first)
    several = client.chat.completions.create(**DRAWN, seed=4, n=2)
    assert several.choices[0].message.content != several.choices[1].message.content == content(first)
    events = list(client.chat.completions.create(**DRAWN, seed=5, stream=True, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == content(first)
    assert sum(map(bool, pieces)) > 1
    assert events[-1].usage == first.usage
    middle = len(content(first)) // 2
    stop = content(first)[middle : middle + 2]
    stopped = client.chat.completions.create(**DRAWN, seed=5, stop=stop)
    assert content(stopped) == content(first).partition(stop)[0]
    assert stopped.choices[0].finish_reason == "stop"
    text = client.completions.create(model="tiny", prompt="hello", max_tokens=8, extra_body={"denoise_steps": 4})
    assert text.usage is not None
    assert text.usage.completion_tokens <= 8
    assert [model.id for model in client.models.list()] == ["tiny"]


def a_file_becomes_a_batch_and_its_outputs(client: openai.OpenAI, wait_until: Callable[..., None]) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
    rows: list[dict[str, Any]] = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(20)
    ]
    rows[7]["body"] = {**body, "temperature": -1}
    file = client.files.create(file=("my rows.jsonl", "\n".join(map(json.dumps, rows)).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a test"}
    )
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", START_S)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 19, 1)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    outputs = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in outputs] == [row["custom_id"] for row in rows if row["custom_id"] != "r7"]
    assert outputs[0]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert "r7" in client.files.content(batch.error_file_id).text
    assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted


def errors_are_those_of_the_client(served: Served, client: openai.OpenAI) -> None:
    def ask(client: openai.OpenAI, **values: Any) -> None:
        client.chat.completions.create(**{**DRAWN, **values})

    with pytest.raises(openai.AuthenticationError):
        ask(served.client("wrong"))
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here, but tiny"):
        ask(client, model="gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-nothing")
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"denoise_stps": 4})
    assert refused.value.param == "denoise_stps"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, messages=[{"role": "user", "content": "hello " * 600}])
    assert refused.value.code == "context_length_exceeded"
    ask(served.client(served.slow_key))
    with pytest.raises(openai.RateLimitError) as limited:
        ask(served.client(served.slow_key))
    assert int(limited.value.response.headers["retry-after"]) > 0


def what_is_under_way_is_sent_to_its_end(served: Served, client: openai.OpenAI) -> None:
    """After SIGTERM; then the process exits with 0."""
    whole = client.chat.completions.create(**DRAWN, seed=5)
    events = iter(client.chat.completions.create(**DRAWN, seed=5, stream=True, extra_body={"stream_rate": 20}))
    pieces = [next(events), next(events)]
    served.service.send_signal(signal.SIGTERM)
    pieces += list(events)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == content(whole)
    assert served.service.wait(timeout=30) == 0
