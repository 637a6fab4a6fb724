"""Requests for text: whole answers, streams, and what their bodies may say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from contract.interactive import is_interactive
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import TEXT, ScriptedWorker, answered, done, failed

MESSAGES = [{"role": "user", "content": "hello"}]


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The documents of a stream, which has to end as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_chat_is_answered_as_openai_does(service: Listening, worker: ScriptedWorker) -> None:
    answer = service.chat(model="demo", temperature=0.5, top_p=0.9, seed=7, stop="END", max_completion_tokens=9)
    assert answer.status_code == 200
    told = answer.json()
    assert told["object"] == "chat.completion"
    assert told["id"].startswith("chatcmpl-")
    (choice,) = told["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert told["denoise"] == {"steps": 3, "forwards": 4, "tokens_per_forward": 2.0}
    (job,) = worker.seen
    assert is_interactive(job.batch)
    assert job.messages is not None
    assert not job.stream
    params = job.params
    assert (params.temperature, params.top_p, params.seed, params.max_new_tokens) == (0.5, 0.9, 7, 9)
    assert params.stop == ("END",)


def test_diffusion_parameters_stand_beside_openais(service: Listening, worker: ScriptedWorker) -> None:
    assert service.chat(denoise_steps=4, block_length=8).status_code == 200
    assert service.chat(rule="threshold", threshold=0.8).status_code == 200
    assert [job.params.denoise_steps for job in worker.seen] == [4, None]
    assert worker.seen[1].params.threshold == 0.8


def test_several_choices_have_seeds_of_their_own(service: Listening, worker: ScriptedWorker) -> None:
    told = service.chat(n=3, seed=2**63 - 2).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert told["usage"]["prompt_tokens"] == 5
    assert told["usage"]["completion_tokens"] == 24
    assert sorted(job.params.seed or 0 for job in worker.seen) == [0, 2**63 - 2, 2**63 - 1]


def test_completions_take_text_token_ids_and_lists_of_them(service: Listening, worker: ScriptedWorker) -> None:
    told = service.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}).json()
    assert told["object"] == "text_completion"
    assert [choice["text"] for choice in told["choices"]] == [TEXT] * 4
    assert told["usage"]["prompt_tokens"] == 10
    assert [job.prompt for job in sorted(worker.seen, key=lambda job: job.index)] == ["a", "a", "b", "b"]
    assert service.post("/v1/completions", {"prompt": [3, 4]}).status_code == 200
    assert service.post("/v1/completions", {"prompt": [[5], [6]]}).status_code == 200
    assert [job.prompt_token_ids for job in worker.seen[4:]] in ([(3, 4), (5,), (6,)], [(3, 4), (6,), (5,)])


def test_generate_answers_output_and_seconds(service: Listening, worker: ScriptedWorker) -> None:
    body = {"prompt": "hello", "max_new_tokens": 16, "denoise_steps": 4, "temperature": 0.0}
    told = service.post("/generate", body).json()
    assert told["output"] == TEXT
    assert told["elapsed_seconds"] > 0
    assert told["usage"]["total_tokens"] == 13
    assert told["denoise"]["forwards"] == 4
    assert worker.seen[0].params.denoise_steps == 4


def test_a_stream_is_the_answer_in_pieces(service: Listening) -> None:
    told = events(service.chat(stream=True, stream_options={"include_usage": True}))
    assert {one["object"] for one in told} == {"chat.completion.chunk"}
    assert len({one["id"] for one in told}) == 1
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in told if one["choices"]) == TEXT
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-2]["denoise"]["steps"] == 3
    assert (told[-1]["choices"], told[-1]["usage"]["total_tokens"]) == ([], 13)
    pieces = events(service.post("/v1/completions", {"prompt": "a", "stream": True}))
    assert "".join(one["choices"][0]["text"] for one in pieces) == TEXT
    assert all("usage" not in one for one in pieces)


def test_the_choices_of_a_stream_are_told_apart(service: Listening) -> None:
    told = events(service.chat(stream=True, n=3, stream_options={"include_usage": True}))
    assert told.pop()["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    for choice in range(3):
        own = [one["choices"][0] for one in told if one["choices"][0]["index"] == choice]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(one["delta"].get("content", "") for one in own) == TEXT
        assert [one["finish_reason"] for one in own].index("stop") == len(own) - 1


def test_blocks_are_sent_as_they_come(service: Listening, worker: ScriptedWorker) -> None:
    """The first is here while the worker still waits for us to have it."""
    read: list[str] = []

    def script(job: Any) -> Any:
        first, *rest = [said for said in answered(job) if said[0] == "block"]
        yield first
        while not read and not worker.stopped:
            time.sleep(0.005)
        yield from [*rest, ("done", done(job))]

    worker.script = script
    body = {"messages": MESSAGES, "stream": True}
    with service.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if '"one"' in line:
                read.append(line)
    assert read


def test_a_row_that_begins_anew_repeats_nothing(service: Listening, worker: ScriptedWorker) -> None:
    """A worker died after three words, and another one sends all of them again; a reply may also come twice."""

    def script(job: Any) -> Any:
        said = answered(job)
        again = ("again", {"worker": "other", "attempt": 1})
        return [*said[:4], again, *said[1:3], *said[2:], said[-1]]

    worker.script = script
    told = events(service.chat(stream=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in told) == TEXT
    assert sum(one["choices"][0]["finish_reason"] == "stop" for one in told) == 1
    assert service.chat().json()["choices"][0]["message"]["content"] == TEXT


def test_a_stream_can_be_smoothed(service: Listening, worker: ScriptedWorker) -> None:
    """All at once from the worker, and yet a word at a time, as fast as asked for."""
    worker.script = lambda job: [
        ("block", {"at": 0, "text": TEXT, "tokens": 8, "seconds": 0.1}),
        ("done", done(job)),
    ]
    began = time.monotonic()
    told = events(service.chat(stream=True, stream_rate=40))
    assert time.monotonic() - began > 7 / 40 * 0.9
    pieces = [piece for one in told if (piece := one["choices"][0]["delta"].get("content"))]
    assert pieces == ["one", " two", " three", " four", " five", " six", " seven", " eight"]


def test_what_a_worker_says_of_a_prompt_has_a_status(service: Listening, worker: ScriptedWorker) -> None:
    for code, status, called in (
        ("prompt_too_long", 400, "context_length_exceeded"),
        ("bad_params", 422, "bad_params"),
        ("deadline_exceeded", 504, "deadline_exceeded"),
        ("model_error", 500, "model_error"),
        ("worker_crashed", 500, "worker_crashed"),
    ):
        worker.script = lambda job, code=code: [failed(job, code, "so it is")]  # type: ignore[misc]
        for stream in (False, True):
            answer = service.chat(stream=stream)
            assert answer.status_code == status
            assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == (called, "so it is")


def test_what_fails_within_a_stream_is_its_last_event(service: Listening, worker: ScriptedWorker) -> None:
    worker.script = lambda job: [*answered(job)[:3], failed(job, "model_error", "so it is")]
    lines = [line for line in service.chat(stream=True).text.split("\n\n") if line]
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "so it is"


def test_one_choice_that_fails_withdraws_the_others(
    service: Listening, worker: ScriptedWorker, wait_until: Callable[..., None]
) -> None:
    worker.script = lambda job: [failed(job, "model_error")] if job.index == 1 else []
    assert service.chat(n=2).status_code == 500
    wait_until(lambda: worker.withdrawn() == 1)


def test_what_is_not_answered_in_time_ends_and_is_withdrawn(
    worker: ScriptedWorker, listening: Callable[..., Listening], wait_until: Callable[..., None]
) -> None:
    worker.script = lambda job: answered(job)[: 1 if job.stream else 0]
    service = listening(serve_timeout_s=0.1)
    assert service.chat().status_code == 504
    assert '"code":"timeout"' in service.chat(stream=True).text
    wait_until(lambda: worker.withdrawn() == 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_takes_its_request_with_it(
    service: Listening, worker: ScriptedWorker, wait_until: Callable[..., None], stream: bool
) -> None:
    worker.script = lambda job: answered(job)[:2] if job.stream else []
    body = {"messages": MESSAGES, "stream": stream}
    with httpx2.Client(base_url=service.url) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx2.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=0.2)
    wait_until(lambda: worker.withdrawn() == 1)
    worker.script = answered
    assert service.chat().status_code == 200


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages"),
    ({"messages": MESSAGES, "temperature": -1}, "temperature"),
    ({"messages": MESSAGES, "temperature": True}, None),
    ({"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
    ({"messages": MESSAGES, "n": 0}, "n"),
    ({"messages": MESSAGES, "n": "2"}, "n"),
    ({"messages": MESSAGES, "stop": ["a"] * 9}, "stop"),
    ({"messages": MESSAGES, "denoise_stps": 3}, "denoise_stps"),
    ({"messages": MESSAGES, "logprobs": True}, "logprobs"),
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": MESSAGES, "stream": "yes"}, "stream"),
    ({"messages": MESSAGES, "stream_rate": -1}, "stream_rate"),
    ({}, "messages"),
]
NO_BODIES = [b"{", b"[]", b"3", b"", b"[" * 100_000, b'{"messages": [], "x": "\\ud800"}', b"\xff"]


def test_a_wrong_field_is_refused_by_name(service: Listening) -> None:
    for body, param in WRONG:
        answer = service.post("/v1/chat/completions", body)
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert error["message"]


def test_a_body_that_is_none_is_refused(service: Listening) -> None:
    for raw in NO_BODIES:
        headers = {"content-type": "application/json"}
        answer = service.client.post("/v1/chat/completions", content=raw, headers=headers)
        assert answer.status_code == 400, raw[:50]
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_openais_clients_send_without_meaning_is_passed_over(service: Listening) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "presence_penalty": 0,
        "logprobs": None,
        "parallel_tool_calls": True,
    }
    assert service.chat(**harmless, tools=[], stop=None, n=None, stream=None).status_code == 200


def test_an_unknown_model_is_not_found_and_the_known_ones_are_named(service: Listening) -> None:
    answer = service.chat(model="gpt-9")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "demo" in answer.json()["error"]["message"]
    assert [one["id"] for one in service.client.get("/v1/models").json()["data"]] == ["demo"]
    assert service.client.get("/v1/models/demo").json()["object"] == "model"
    assert service.client.get("/v1/models/other").status_code == 404


def test_without_a_worker_it_is_unavailable(listening: Callable[..., Listening]) -> None:
    service = listening()
    answer = service.chat()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_worker"
    assert int(answer.headers["retry-after"]) >= 1
    assert service.client.get("/readyz").status_code == 503
    assert service.client.get("/healthz").status_code == 200


def test_other_addresses_and_methods_are_answered_in_the_same_shape(service: Listening) -> None:
    for answer, status in ((service.client.get("/v1/nothing"), 404), (service.client.get("/generate"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        assert answer.headers["x-request-id"].startswith("req_")
    assert service.client.get("/readyz").json() == {"status": "ok", "redis": True, "workers": 1}


def test_a_piece_that_is_missing_comes_with_the_end(service: Listening, worker: ScriptedWorker) -> None:
    """Redis forgot a reply: what follows it is held back, and nothing is out of place."""
    worker.script = lambda job: [said for number, said in enumerate(answered(job)) if number != 3]
    told = events(service.chat(stream=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in told) == TEXT


def test_a_reply_that_cannot_be_read_ends_its_request(service: Listening, worker: ScriptedWorker) -> None:
    worker.script = lambda job: [("done", {"no": "completion"})]
    answer = service.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "unreadable_reply")
    worker.script = answered
    assert service.chat().status_code == 200


class Broken:
    """A filter with a bug."""

    def __init__(self, settings: Any) -> None:
        pass

    async def prompt(self, text: str, caller: str) -> str | None:
        raise RuntimeError("a bug")


def test_a_bug_is_answered_in_the_shape_of_all_errors(
    worker: ScriptedWorker, listening: Callable[..., Listening]
) -> None:
    answer = listening(serve_filters=f"{__name__}:Broken").chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert answer.headers["x-request-id"].startswith("req_")
    assert worker.seen == []


def test_more_than_a_body_may_hold_is_refused(worker: ScriptedWorker, listening: Callable[..., Listening]) -> None:
    service = listening(serve_max_body_mb=1)
    assert service.chat("a" * (1 << 20)).status_code == 413
    assert service.chat("a" * (1 << 18), n=5).json()["error"]["param"] == "n"
    pieces = (b"a" * 65536 for _ in range(17))
    answer = service.client.post("/generate", content=pieces, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
