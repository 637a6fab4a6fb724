"""One call to an endpoint: what is sent, what is timed, and what becomes of every kind of failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import httpx2
import pytest

from contract.jobs import Message
from producer.endpoint.client import MAX_TOKENS, Call, Dialect, Failure, Kind, Target, call
from producer.endpoint.events import Events
from producer.endpoint.load import LONGEST_PAUSE_S, PAUSE_S, pause_after
from producer.endpoint.prompts import Prompt

TARGET = Target("http://endpoint/v1", "tiny", "chat", True, None, 5.0, {}, Dialect())
HELLO = Prompt("Hello")
EVENTS_OF = "text/event-stream"


class Pieces(httpx2.AsyncByteStream):
    """A body that comes in these pieces, each after a pause; ends with an error if there is one."""

    def __init__(self, pieces: Sequence[bytes], pause_s: float, error: Exception | None) -> None:
        self.pieces, self.pause_s, self.error = pieces, pause_s, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            await asyncio.sleep(self.pause_s)
            yield piece
        if self.error:
            raise self.error


@pytest.fixture
def ask() -> Callable[..., Call]:
    """Make one call to a server that answers with these pieces."""

    def asked(
        *pieces: bytes | dict[str, Any],
        kind: str = EVENTS_OF,
        status: int = 200,
        target: Target = TARGET,
        error: Exception | None = None,
        pause_s: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> Call:
        body = [piece if isinstance(piece, bytes) else event(piece) for piece in pieces]

        def answer(request: httpx2.Request) -> httpx2.Response:
            return httpx2.Response(
                status, headers={"content-type": kind, **(headers or {})}, stream=Pieces(body, pause_s, error)
            )

        async def made() -> Call:
            secret = {"Authorization": "Bearer sk-secret"}
            async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), headers=secret) as http:
                return await call(http, target, HELLO)

        return asyncio.run(made())

    return asked


def event(document: dict[str, Any] | str) -> bytes:
    return f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()


def text(word: str, **values: Any) -> dict[str, Any]:
    return {"model": "tiny-1", "choices": [{"delta": {"content": word}, "finish_reason": None, **values}]}


DONE = event("[DONE]")
STOP = text("", finish_reason="stop")
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}


def test_events_are_the_same_wherever_the_stream_is_torn() -> None:
    stream = b": hello\r\n\r\nevent: x\ndata: one\r\n\r\ndata:two\ndata: lines\n\n\n: ping\n\ndata: \xc3\xa9nd"
    wanted = ["one", "two\nlines", "énd"]
    for at in range(len(stream)):
        events = Events()
        assert [*events.feed(stream[:at]), *events.feed(stream[at:]), *events.end()] == wanted, at
    events = Events()
    assert [one for byte in stream for one in events.feed(bytes([byte]))] + events.end() == wanted


def test_a_stream_is_timed_by_the_arrivals_of_text_and_counted_by_usage(ask: Callable[..., Call]) -> None:
    role, block = text("", delta={"role": "assistant", "content": ""}), event(text("two ")) + event(text("words "))
    done = ask(role, block, block, STOP, USAGE, DONE, pause_s=0.02)
    assert done.failure is None
    assert len(done.gaps_s) == 1, "a block in one read is one arrival, and neither role nor end is text"
    assert done.first_s is not None
    assert done.first_s >= 0.04
    assert done.gaps_s[0] >= 0.02
    assert done.seconds >= done.first_s + done.gaps_s[0] + 0.04
    assert (done.prompt_tokens, done.output_tokens) == (5, 4)
    assert (done.finish_reason, done.model) == ("stop", "tiny-1")


def test_the_last_usage_of_a_stream_counts_and_what_is_no_number_does_not(ask: Callable[..., Call]) -> None:
    early = {**text("a"), "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    assert ask(early, STOP, USAGE, DONE).output_tokens == 4
    for wrong in (None, {}, [], {"completion_tokens": "4"}, {"completion_tokens": -1}, {"completion_tokens": True}):
        assert ask(text("a"), {**STOP, "usage": wrong}, DONE).output_tokens is None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "tool_calls"])
def test_thoughts_and_tool_calls_are_output_too(ask: Callable[..., Call], field: str) -> None:
    assert ask(text("", delta={field: "hm"}), STOP, DONE).first_s is not None


def test_an_answer_in_one_piece_has_no_time_to_the_first_token(ask: Callable[..., Call]) -> None:
    whole = {"model": "m", "choices": [{"message": {"content": "hi"}, "finish_reason": "length"}], **USAGE}
    whole["choices"] = [{"message": {"content": "hi"}, "finish_reason": "length"}]
    done = ask(json.dumps(whole).encode(), kind="application/json", target=replace(TARGET, stream=False))
    assert (done.failure, done.first_s, done.gaps_s) == (None, None, ())
    assert (done.output_tokens, done.finish_reason) == (4, "length")


def test_a_stream_is_complete_with_a_finish_reason_or_with_done(ask: Callable[..., Call]) -> None:
    assert ask(text("a"), DONE).failure is None
    assert ask(text("a"), STOP).failure is None
    assert kind_of(ask(text("a"))) is Kind.BROKEN_STREAM
    assert kind_of(ask(text("a"), error=httpx2.ReadError("reset"))) is Kind.BROKEN_STREAM


def kind_of(done: Call) -> Kind | None:
    return done.failure.kind if done.failure else None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((401, "unauthorized"), (403, "unauthorized"), (404, "not_found"), (429, "rate_limited")),
        *((400, "bad_request"), (422, "bad_request"), (307, "bad_request"), (500, "server_error")),
    ],
)
def test_a_status_tells_the_kind_of_failure(ask: Callable[..., Call], status: int, kind: str) -> None:
    done = ask(b'{"error": {"message": "because"}}', status=status, kind="application/json")
    assert done.failure == Failure(Kind(kind), "because", status)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "beside"}', "beside"),
        (b'{"detail": [{"loc": "x"}]}', '\'[{"loc": "x"}]\''),
        (b"<html>\n <b>Bad Gateway</b>", "'<html> <b>Bad Gateway</b>'"),
        (b"\xff\xfe", "'\ufffd\ufffd'"),
        (b'{"error": "key sk-secret is wrong"}', "key … is wrong"),
    ],
)
def test_a_failure_speaks_the_servers_words_but_never_the_key(
    ask: Callable[..., Call], body: bytes, message: str
) -> None:
    done = ask(body, status=500)
    assert done.failure is not None
    assert done.failure.message == message


@pytest.mark.parametrize("body", [b"{'choices'", b"[]", b"{}", b'{"choices": null}', b'{"choices": []}', b"[" * 9000])
def test_what_is_no_answer_is_said_to_be_none(ask: Callable[..., Call], body: bytes) -> None:
    assert kind_of(ask(body, kind="application/json")) is Kind.BAD_ANSWER
    assert kind_of(ask(b"data: " + body + b"\n\n", DONE)) is Kind.BAD_ANSWER


def test_an_error_inside_a_stream_is_the_servers(ask: Callable[..., Call]) -> None:
    done = ask(text("a"), {"error": {"message": "the worker is gone"}})
    assert done.failure == Failure(Kind.SERVER_ERROR, "the worker is gone")


def test_a_call_ends_with_its_time(ask: Callable[..., Call]) -> None:
    done = ask(text("a"), text("b"), pause_s=20.0, target=replace(TARGET, timeout_s=0.05))
    assert kind_of(done) is Kind.TIMEOUT
    assert 0.05 <= done.seconds < 15


def test_an_endless_answer_is_not_read_to_its_end(ask: Callable[..., Call]) -> None:
    done = ask(*[b"data: " + b"x" * (1 << 20)] * 70)
    assert kind_of(done) is Kind.BAD_ANSWER


def test_a_client_waits_as_long_as_a_busy_server_asks_for_but_within_reason(ask: Callable[..., Call]) -> None:
    def pause(status: int, value: str | None) -> float:
        return pause_after(ask(b"{}", status=status, headers={"Retry-After": value} if value else None))

    assert pause(429, "2") == 2.0
    assert pause(429, "9999") == LONGEST_PAUSE_S
    assert pause(429, formatdate(time.time() + 20, usegmt=True)) == pytest.approx(19.5, abs=3)
    assert pause(429, None) == pause(429, "soon") == PAUSE_S
    assert pause(503, "1") == 1.0
    assert pause(500, None) == pause(400, "5") == 0.0


def test_the_request_is_what_the_api_asks_for() -> None:
    turns = Prompt((Message(role="system", content="Be brief."), Message(role="user", content="Hi")))
    body = TARGET.body(turns)
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert body["max_tokens"] == MAX_TOKENS
    assert TARGET.body(HELLO)["messages"] == [{"role": "user", "content": "Hello"}]
    plain = replace(TARGET, api="completions", stream=False, dialect=Dialect("max_completion_tokens", False))
    assert plain.body(Prompt((1, 2, 3), {"seed": 7}, 9)) == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "seed": 7,
        "max_completion_tokens": 9,
    }
    flags = replace(plain, max_tokens=5, params={"seed": 8})
    assert (flags.body(Prompt("x", {"seed": 7}, 9))["seed"], flags.limit(Prompt("x", {}, 9))) == (8, 5)
