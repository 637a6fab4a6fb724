"""What may not go in or come out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from contract.errors import SettingsError
from contract.ledger import Ledger
from contract.settings import ProducerSettings
from producer import listening as serving
from producer.gateway import filters
from producer.gateway.filters import Words, whole_words
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import ScriptedWorker, answered


class NoQuestions:
    """A filter of somebody's own."""

    def __init__(self, settings: ProducerSettings) -> None:
        self._model = settings.model

    async def prompt(self, text: str, caller: str) -> str | None:
        return f"{caller} asks {self._model} a question" if "?" in text else None

    async def output(self, text: str, caller: str) -> str | None:
        return None


@pytest.mark.parametrize(
    ("word", "text", "held"),
    [
        ("bad", "this is BAD.", True),
        ("bad", "a badge", False),
        ("very bad", "very\n bad", True),
        ("very bad", "very good, bad", False),
        ("straße", "STRASSE", True),
        ("café", "cafe\u0301", True),
        ("c++", "use c++ now", True),
        ("坏蛋", "这个坏蛋啊", True),
        ("bad", "", False),
    ],
)
def test_words_are_found_as_whole_ones_however_they_are_written(word: str, text: str, held: bool) -> None:
    assert (asyncio.run(Words([word]).prompt(text, "-")) is not None) is held


def test_a_word_at_the_end_may_not_be_over() -> None:
    assert [whole_words(text) for text in ("a bad", "a bad ", "a bad,", "bad", "", "这个坏", "x_1")] == [
        "a ",
        "a bad ",
        "a bad,",
        "",
        "",
        "这个坏",
        "",
    ]


def test_what_is_named_and_is_not_there_is_told(producer_settings: Callable[..., ProducerSettings]) -> None:
    for named in ("nothing", "json:nothing", "no.such.module:name"):
        with pytest.raises(SettingsError, match="serve_filters"):
            filters.load(producer_settings(serve_filters=named))
    with pytest.raises(SettingsError, match="serve_filter_words"):
        filters.load(producer_settings(serve_filter_words="/no/such/file"))


def test_a_service_with_a_wrong_filter_does_not_start(
    producer_settings: Callable[..., ProducerSettings], ledger: Ledger
) -> None:
    with pytest.raises(SettingsError, match="serve_filters"):
        serving.serve(producer_settings(serve_filters="nothing", serve_port=0), ledger)


def test_refused_prompts_and_outputs(
    worker: ScriptedWorker, listening: Callable[..., Listening], tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("# a comment\nforbidden\ntop secret\n")
    service = listening(serve_filter_words=words, serve_filters=f"{__name__}:NoQuestions")
    for text, why in (("a Forbidden thing", "not allowed here"), ("why?", "- asks demo a question")):
        answer = service.chat(text)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "content_filter"
        assert why in answer.json()["error"]["message"]
    assert service.post("/v1/completions", {"prompt": [1, 2]}).status_code == 400
    assert worker.seen == []
    worker.script = lambda job: answered(job, "it is a top secret thing")
    (choice,) = service.chat().json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "content_filter")
    assert service.post("/generate", {"prompt": "a"}).json()["error"]["code"] == "content_filter"


def test_a_stream_never_shows_a_whole_forbidden_phrase(
    worker: ScriptedWorker, listening: Callable[..., Listening], tmp_path: Path
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("top secret\n")
    service = listening(serve_filter_words=words)

    def told(text: str) -> tuple[str, str]:
        worker.script = lambda job: answered(job, text)
        lines = service.chat(stream=True).text.split("\n\n")[:-2]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        return "".join(one["delta"].get("content", "") for one in choices), choices[-1]["finish_reason"]

    assert told("it is a top secret thing") == ("it is a top ", "content_filter")
    assert told("it is a top secretary") == ("it is a top secretary", "stop")
