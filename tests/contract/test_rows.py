"""Rows of both shapes: what they ask for, and how a wrong one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract import rows
from contract.columns import Columns
from contract.errors import BadPrompt
from contract.jobs import ErrorCode, Message


def refusal(row: Any) -> BadPrompt:
    with pytest.raises(BadPrompt) as caught:
        read(row)
    return caught.value


def read(row: Any) -> tuple[rows.Prompt, str | None, dict[str, Any]]:
    arranged = rows.arrange(rows.decode(json.dumps(row).encode(), 0))
    request = rows.body(arranged)
    found = rows.prompt(request), rows.model(request), rows.parameters(request)
    rows.metadata(arranged)
    rows.refuse_mistaken(arranged)
    return found


def carried(row: dict[str, Any]) -> dict[str, Any]:
    arranged = rows.arrange(row)
    rows.refuse_mistaken(arranged)
    return rows.metadata(arranged)


def batch_row(url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    usual = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in url else {"prompt": "hi"}
    return {"custom_id": "c", "method": "POST", "url": url, "body": {**usual, **body}}


def test_plain_row_takes_parameters_beside_the_prompt_or_under_params() -> None:
    assert read({"prompt": "hi", "seed": 3}) == ("hi", None, {"seed": 3})
    assert read({"prompt": "hi", "params": {"seed": 3}}) == ("hi", None, {"seed": 3})


def test_plain_row_may_be_a_conversation() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompt, _, _ = read({"messages": turns})
    assert prompt == (Message(role="system", content="be brief"), Message(role="user", content="hi"))


def test_chat_completions_row_gives_messages_model_and_parameters() -> None:
    prompt, model, asked = read(batch_row(model="demo", max_tokens=9, temperature=0.5, user="u", n=1, stream=False))
    assert prompt == (Message(role="user", content="hi"),)
    assert model == "demo"
    assert asked == {"max_tokens": 9, "temperature": 0.5}


def test_completions_row_gives_its_prompt() -> None:
    assert read(batch_row("/v1/completions", echo=False))[0] == "hi"


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt, _, _ = read(batch_row(messages=[{"role": "user", "content": parts}]))
    assert prompt == (Message(role="user", content="one\ntwo"),)


def test_empty_leftovers_of_logged_messages_are_passed_over() -> None:
    turn = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": []}
    assert read(batch_row(messages=[turn]))[0] == (Message(role="assistant", content="yes"),)


def test_a_prompt_may_be_tokens_already() -> None:
    assert read({"prompt_token_ids": [5, 0, 7]})[0] == (5, 0, 7)
    assert read(batch_row("/v1/completions", prompt=[5, 0, 7]))[0] == (5, 0, 7)


@pytest.mark.parametrize(
    "name", ["topic", "step", "seeds", "temperature_c", "actor", "truncated", "tokens", "n", "url", "method", "Ünï", ""]
)
def test_keys_that_are_nobodys_parameters_are_carried(name: str) -> None:
    row = {"prompt": "hi", name: {"any": [1, None, "x"]}}
    assert read(row) == ("hi", None, {})
    assert carried(row) == {name: {"any": [1, None, "x"]}}


def test_metadata_may_be_given_as_such() -> None:
    assert carried({"prompt": "a", "x": 1, "metadata": {"topK": 2}}) == {"topK": 2, "x": 1}
    assert carried({"prompt": "a", "metadata": "text"}) == {"metadata": "text"}
    assert carried(batch_row(metadata={"x": "1"})) == {"x": "1"}
    assert carried(batch_row()) == carried({"prompt": "a"}) == {}


def test_a_column_of_text_called_body_does_not_make_a_batch_row() -> None:
    assert carried({"prompt": "a", "body": "dear all"}) == {"body": "dear all"}


def test_named_columns_hold_prompt_and_id_and_others_of_our_names_are_carried() -> None:
    columns = Columns(prompt="question", id="key")
    row = {"question": "why", "key": 7, "prompt": "old", "id": "x", "seed": 1, "url": "u"}
    arranged = rows.arrange(row, columns)
    assert rows.row_id(arranged) == "7"
    assert rows.prompt(rows.body(arranged)) == "why"
    assert rows.parameters(rows.body(arranged)) == {"seed": 1}
    assert rows.metadata(arranged) == {"prompt": "old", "id": "x", "url": "u"}


def test_model_is_the_last_part_of_its_path() -> None:
    assert read({"prompt": "hi", "model": "models/demo/"})[1] == "demo"


@pytest.mark.parametrize("row", [{"custom_id": "a"}, {"id": "a"}, {"custom_id": "a", "id": "a"}])
def test_id_goes_by_either_name(row: dict[str, Any]) -> None:
    assert rows.row_id(row) == "a"


def test_numbers_are_ids_too() -> None:
    assert rows.row_id({"id": 17}) == "17"


@pytest.mark.parametrize("row", [{"id": ""}, {"id": True}, {"id": ["a"]}, {"id": "a", "custom_id": "b"}])
def test_an_id_that_names_nothing_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(BadPrompt, match="id"):
        rows.row_id(row)


@pytest.mark.parametrize(
    ("row", "code", "says"),
    [
        (["hi"], ErrorCode.BAD_ROW, "expected a JSON object, found a list"),
        ("hi", ErrorCode.BAD_ROW, "found text"),
        ({}, ErrorCode.BAD_ROW, "'prompt', 'messages' or 'prompt_token_ids' is missing"),
        ({"prompt": None}, ErrorCode.BAD_ROW, "is missing"),
        ({"prompt": "a", "messages": []}, ErrorCode.BAD_ROW, "exclude each other"),
        ({"prompt": ["a", "b"]}, ErrorCode.BAD_ROW, "give each prompt its own row"),
        ({"prompt": 7}, ErrorCode.BAD_ROW, "found a number"),
        ({"prompt": [[1, 2], [3]]}, ErrorCode.BAD_ROW, "give each prompt its own row"),
        ({"prompt": "a", "prompt_token_ids": [1]}, ErrorCode.BAD_ROW, "'prompt' and 'prompt_token_ids' exclude"),
        ({"prompt_token_ids": []}, ErrorCode.EMPTY_PROMPT, "no tokens"),
        ({"prompt_token_ids": "1 2"}, ErrorCode.BAD_ROW, "must be a list of numbers, found text"),
        ({"prompt_token_ids": [1, -1]}, ErrorCode.BAD_ROW, "token 2 must be a whole number from 0 on, found -1"),
        ({"prompt_token_ids": [1, True]}, ErrorCode.BAD_ROW, "token 2 must be a whole number from 0 on, found True"),
        ({"prompt_token_ids": [1.0]}, ErrorCode.BAD_ROW, "token 1 must be a whole number"),
        ({"prompt_token_ids": [2**31]}, ErrorCode.BAD_ROW, "token 1 must be a whole number"),
        ({"prompt": " \n"}, ErrorCode.EMPTY_PROMPT, "empty"),
        ({"messages": []}, ErrorCode.EMPTY_PROMPT, "empty"),
        ({"messages": "hi"}, ErrorCode.BAD_ROW, "must be a list"),
        ({"messages": ["hi"]}, ErrorCode.BAD_ROW, "message 1 must be a JSON object"),
        ({"messages": [{"role": "usr", "content": "a"}]}, ErrorCode.BAD_ROW, "did you mean 'user'?"),
        ({"messages": [{"role": "user"}]}, ErrorCode.BAD_ROW, "content must be text, found nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ErrorCode.BAD_ROW, "type 'text'"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, ErrorCode.BAD_ROW, "'name' is not supported"),
        ({"promt": "a"}, ErrorCode.BAD_ROW, "is missing; is 'promt' it?"),
        ({"prompt": "a", "temprature": 1}, ErrorCode.BAD_PARAMS, "did you mean 'temperature'?"),
        ({"prompt": "a", "topK": 1}, ErrorCode.BAD_PARAMS, "did you mean 'top_k'?): if not, put it under 'metadata'"),
        ({"prompt": "a", "Seed": 1}, ErrorCode.BAD_PARAMS, "did you mean 'seed'?"),
        ({"prompt": "a", "max_new_token": 1}, ErrorCode.BAD_PARAMS, "did you mean 'max_new_tokens'?"),
        ({"prompt": "a", "stop": ["x"]}, ErrorCode.BAD_PARAMS, "stop = ['x'] is not supported"),
        ({"prompt": "a", "x": 1, "metadata": {"x": 2}}, ErrorCode.BAD_ROW, "'x' stands beside metadata and in it"),
        ({"prompt": "a", "params": {"metadata": 1}}, ErrorCode.BAD_PARAMS, "'metadata' belongs beside params"),
        ({"prompt": "a", "x": json.loads("[" * 99 + "]" * 99)}, ErrorCode.BAD_ROW, "nested more than 64 deep"),
        ({"prompt": "a", "params": 3}, ErrorCode.BAD_ROW, "params must be a JSON object"),
        ({"prompt": "a", "seed": 1, "params": {"seed": 2}}, ErrorCode.BAD_PARAMS, "beside params or in it, not both"),
        ({"prompt": "a", "model": 3}, ErrorCode.BAD_ROW, "model must be text"),
        ({"custom_id": "c", "body": [1]}, ErrorCode.BAD_ROW, "body must be a JSON object"),
        ({"custom_id": "c", "body": {"prompt": "a"}, "extra": 1}, ErrorCode.BAD_ROW, "unknown key 'extra'"),
        ({**batch_row(), "method": "GET"}, ErrorCode.BAD_ROW, "method must be 'POST'"),
        (batch_row("/v1/embeddings"), ErrorCode.BAD_ROW, "url must be one of /v1/chat/completions"),
        (batch_row(messages=None), ErrorCode.BAD_ROW, "needs 'messages'"),
        (batch_row(stream=True), ErrorCode.BAD_PARAMS, "stream = True is not supported: remove it"),
        (batch_row(n=2), ErrorCode.BAD_PARAMS, "n = 2"),
        (batch_row(stop=["\n"]), ErrorCode.BAD_PARAMS, "stop"),
        (batch_row(**{"x" * 5000: 1}), ErrorCode.BAD_PARAMS, "unknown parameter 'xxx"),
    ],
)
def test_a_wrong_row_is_refused_with_the_key_and_what_would_be_right(row: Any, code: ErrorCode, says: str) -> None:
    error = refusal(row)
    assert error.code == code
    assert says in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize("raw", ["{", '{"prompt": "a"} x', '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_not_json_is_refused_as_such(raw: str) -> None:
    with pytest.raises(BadPrompt) as caught:
        rows.decode(raw.encode(), 0)
    assert caught.value.code == ErrorCode.BAD_JSON


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"prompt": "caf\xe9"}', "byte 0xe9 at offset 1015 of the file"),
        (b'{\x00"\x00', "UTF-16"),
        (rb'{"prompt": "\ud83d"}', "half a surrogate pair"),
    ],
)
def test_what_no_utf8_output_could_hold_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(BadPrompt, match=says) as caught:
        rows.decode(raw, 1000)
    assert caught.value.code == ErrorCode.BAD_ENCODING


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert rows.decode(rb'{"prompt": "\ud83d\ude00"}', 0) == {"prompt": "\U0001f600"}
