"""`producer bench-endpoint` against a server that answers well and against one that misbehaves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from producer.cli import app
from producer.endpoint.load import Plan
from producer.endpoint.prompts import BUILT_IN, choose
from tests.producer.conftest import PRODUCER
from tests.producer.fake_endpoint import KEY, WORDS, FakeEndpoint, running

Bench = Callable[..., Result]
QUICK = ("--concurrency", "2", "--rounds", "2", "--calls", "4", "--warmup", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeEndpoint]:
    with running() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeEndpoint) -> FakeEndpoint:
    server.forget()
    return server


@pytest.fixture
def bench(fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command on a server that behaves as the first word says; the model is `tiny` unless one is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def run(behaviour: str, *words: object, model: str | None = "tiny") -> Result:
        named = ("--model", model) if model else ()
        address = behaviour if "/" in behaviour else fake.url(behaviour)
        given = ("bench-endpoint", "--base-url", address, *named, *map(str, words))
        return CliRunner().invoke(app, given)

    return run


@pytest.fixture
def report(bench: Bench) -> Callable[..., dict[str, Any]]:
    """The same quickly, and the report as `--json -` gives it; `code` is the exit code that must come."""

    def measured(behaviour: str, *words: object, code: int = 0, **values: Any) -> dict[str, Any]:
        done = bench(behaviour, *QUICK, "--json", "-", *words, **values)
        assert done.exit_code == code, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return measured


def process(fake: FakeEndpoint, folder: Path, behaviour: str, *words: str) -> subprocess.Popen[str]:
    """The installed command in an empty folder."""
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*PRODUCER, "bench-endpoint", "--base-url", fake.url(behaviour), *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def test_the_command_measures_and_says_under_which_conditions(fake: FakeEndpoint, tmp_path: Path) -> None:
    files = ("--json", "r.json", "--markdown", "r.md", "--plot", "r.png")
    told, progress = process(fake, tmp_path, "one-model", "--concurrency", "1,2", "--calls", "4", *files).communicate()
    assert "concurrency 2  round 5: " in progress
    for heading in ("Output tokens per second", "Tokens per minute", "Milliseconds", "Conditions", "capacity: "):
        assert heading in told
    for row in ("first token", "inter-block", "end to end", "fake/1.0", "of each prompt, else 128", "20 of 20"):
        assert row in told
    assert "Calls that failed" not in told
    document = json.loads((tmp_path / "r.json").read_text())
    conditions = document["conditions"]
    assert (conditions["model"], conditions["server"], conditions["answered_as"]) == ("tiny", "fake/1.0", ["tiny"])
    assert conditions["prompts"]["count"] == len(BUILT_IN)
    assert {"host", "platform", "cpu", "cores", "python", "httpx2", "date"} <= set(conditions["client"])
    assert [one["concurrency"] for one in document["levels"]] == [1, 2]
    assert document["levels"][0]["output_tokens"]["mean"] == len(WORDS)
    assert "| 2 |" in (tmp_path / "r.md").read_text()
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r.json", "r.md", "r.png"], "and nothing else"


def test_ctrl_c_reports_what_was_measured_so_far(fake: FakeEndpoint, tmp_path: Path) -> None:
    measuring = process(fake, tmp_path, "good", "--model", "tiny", "--rounds", "9999", "--calls", "1", "--json", "-")
    assert measuring.stderr is not None
    while "round 2" not in measuring.stderr.readline():
        assert measuring.poll() is None
    measuring.send_signal(signal.SIGINT)
    told, _ = measuring.communicate()
    assert measuring.returncode == 130
    document = json.loads(told)
    assert document["interrupted"] is True
    assert document["levels"][0]["rounds"] >= 2


def test_the_load_is_what_the_plan_says_and_the_same_in_every_round(
    fake: FakeEndpoint, report: Callable[..., dict[str, Any]]
) -> None:
    found = report("good", "--concurrency", "1,3", "--calls", "6", "--warmup", "2", "--max-tokens", "7")
    bodies = fake.bodies("good")
    plan = Plan((1, 3), 2, 6, 2)
    assert len(bodies) == plan.total == 1 + 2 * (6 + 6) + 2 * (1 + 3)
    assert fake.most_running <= 3
    assert [one["calls"] for one in found["levels"]] == [12, 12], "what warmed up does not count"
    assert {body["max_tokens"] for body in bodies} == {7}
    first, second = ([body["messages"][0]["content"] for body in bodies[at : at + 6]] for at in (3, 9))
    assert first == second
    assert len(set(first)) == 6


def test_usage_that_is_missing_is_named_with_what_to_do_and_never_guessed(
    fake: FakeEndpoint, bench: Bench, report: Callable[..., dict[str, Any]]
) -> None:
    found = report("no-usage")
    assert found["levels"][0]["output_tokens_per_s"] is None
    assert found["levels"][0]["without_usage"] == 8
    assert found["levels"][0]["first_token_s"]["count"] == 8
    assert found["capacity"] is None
    told = bench("no-usage", *QUICK).stdout
    assert "8 of 8 answers came without usage, so there are no token rates: measure with --no-stream" in told
    assert "have the server send usage in its answers" in bench("no-usage", *QUICK, "--no-stream").stdout


def test_a_server_that_refuses_stream_options_is_asked_without(
    fake: FakeEndpoint, report: Callable[..., dict[str, Any]]
) -> None:
    found = report("no-stream-options")
    assert "the server refuses stream_options.include_usage: usage was not asked for" in found["notes"]
    assert found["conditions"]["include_usage"] is False
    assert ["stream_options" in body for body in fake.bodies("no-stream-options")] == [True] + [False] * 9


def test_a_server_that_wants_the_new_name_of_the_limit_gets_it(report: Callable[..., dict[str, Any]]) -> None:
    assert "the server wants 'max_completion_tokens' in place of 'max_tokens'" in report("new-limit")["notes"]


def test_without_a_stream_there_is_no_first_token_and_usage_counts(
    fake: FakeEndpoint, report: Callable[..., dict[str, Any]]
) -> None:
    found = report("good", "--no-stream", "--api", "completions", "--param", "temperature=0.5", "--prompt", "Hello")
    assert found["levels"][0]["first_token_s"] is None
    assert found["levels"][0]["output_tokens_per_s"]["median"] > 0
    assert fake.bodies("good")[-1] == {"model": "tiny", "prompt": "Hello", "max_tokens": 128, "temperature": 0.5}
    assert "the server answered in one piece although asked to stream" in report("no-stream")["notes"][0]


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("out-of-memory-at-times", "server_error", "CUDA out of memory"),
        ("busy-at-times", "rate_limited", "slow down"),
        ("breaks-at-times", "broken_stream", "peer closed connection"),
        ("ends-early-at-times", "broken_stream", "without a finish_reason"),
        ("error-inside-at-times", "server_error", "the worker is gone"),
        ("garbage-at-times", "bad_answer", "not JSON"),
        ("hangs-at-times", "timeout", "no whole answer within 2 s"),
    ],
)
def test_calls_that_fail_are_counted_and_the_rest_is_measured(
    report: Callable[..., dict[str, Any]], behaviour: str, kind: str, message: str
) -> None:
    limit = ("--timeout-s", "2") if kind == "timeout" else ()
    found = report(behaviour, *limit, "--concurrency", "1", "--rounds", "1", code=1)["levels"][0]
    assert found["failures"] == {kind: 2}
    assert message in found["first_messages"][kind]
    assert (found["error_rate"], found["answered"]) == (0.5, 2)
    assert found["timeout_rate"] == (0.5 if kind == "timeout" else 0.0)
    assert found["output_tokens"]["count"] == 2


def test_failures_stand_in_the_table_with_the_servers_words(bench: Bench) -> None:
    told = bench("out-of-memory-at-times", *QUICK).stdout
    assert "50.0%" in told
    assert "4 server_error: CUDA out of memory" in told


def test_a_server_that_dies_is_not_asked_to_the_bitter_end(report: Callable[..., dict[str, Any]]) -> None:
    found = report("dies", "--rounds", "50", "--concurrency", "1", "--calls", "2", code=1)
    assert found["levels"][0]["calls"] == 6
    assert "stopped after round 3 at concurrency 1: not one call was answered" in found["notes"]


ERRORS = {
    "web-page": (1, "answers with text/html; charset=utf-8, not with JSON: this is no OpenAI-compatible API"),
    "nothing": (1, "has neither models nor chat (404: Not Found): is that the address?"),
    "unauthorized": (2, "the server refuses the API key (401: Incorrect API key provided: none): give one with"),
    "out-of-memory": (1, "the first call failed: the server failed: read its log (500: CUDA out of memory)"),
    "busy": (1, "the server is busy or limits this key: try again later (429: slow down)"),
    "garbage": (1, "this is no OpenAI-compatible answer: is the address right? (not JSON:"),
    "breaks": (1, "the stream broke: try --no-stream"),
    "hangs": (1, "raise --timeout-s, or lower --max-tokens (no whole answer within 0.1 s)"),
    "http://127.0.0.1:9/v1": (1, "cannot reach http://127.0.0.1:9/v1: Connection refused; is a server running there?"),
    "127.0.0.1:8000/v1": (2, "give the whole address, such as http://127.0.0.1:8000/v1"),
    "http://user:pw@host:x/v1": (2, "--base-url"),
}


@pytest.mark.parametrize("behaviour", ERRORS)
def test_what_cannot_be_measured_is_one_line_that_says_what_to_do(bench: Bench, behaviour: str) -> None:
    done = bench(behaviour, *(("--timeout-s", "0.1") if behaviour == "hangs" else ()))
    code, message = ERRORS[behaviour]
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_an_unknown_model_is_told_with_those_that_there_are(bench: Bench) -> None:
    wrong = bench("good", model="tinny")
    assert wrong.exit_code == 2
    assert "no model 'tinny' (did you mean 'tiny'?): the server lists tiny, tiny-base" in wrong.stderr
    assert "name a model with --model: the server lists tiny, tiny-base" in bench("good", model=None).stderr
    assert "the server lists no models: name one" in bench("no-list", model=None).stderr


def test_a_server_that_answers_for_a_model_that_it_does_not_list_is_measured(
    report: Callable[..., dict[str, Any]],
) -> None:
    assert "does not list the model 'else', but answers for it" in report("any-model", model="else")["notes"][0]
    assert report("no-list")["levels"][0]["answered"] == 8


def test_an_address_without_v1_and_one_with_too_much_are_told_what_is_missing(bench: Bench, fake: FakeEndpoint) -> None:
    without = bench(f"{fake.root}/good")
    assert without.exit_code == 2
    assert f"has no /models, but {fake.url('good')} has: use that as --base-url" in without.stderr
    assert "leave '/chat/completions' away" in bench(f"{fake.url('good')}/chat/completions").stderr


def test_keys_come_from_flag_setting_and_environment_and_are_shown_nowhere(
    bench: Bench, fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-service")
    wrong = bench("unauthorized")
    assert wrong.exit_code == 2
    assert "sk-of" not in wrong.output
    monkeypatch.setenv("DLLM_API_KEY", KEY)
    done = bench("unauthorized", *QUICK, "--json", "r.json", "--markdown", "r.md")
    assert done.exit_code == 0
    assert "with the key from setting api_key" in done.stderr
    assert bench("unauthorized", *QUICK, "--api-key", "sk-wrong").exit_code == 2
    shown = done.output + (tmp_path / "r.json").read_text() + (tmp_path / "r.md").read_text()
    assert KEY not in shown
    assert "copied whole" in bench("good", "--api-key", "sk-ü").stderr


def test_user_and_password_of_an_address_are_not_reported(bench: Bench, fake: FakeEndpoint) -> None:
    done = bench(fake.url("good").replace("http://", "http://me:hidden@"), *QUICK)
    assert done.exit_code == 0
    assert "hidden" not in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--concurrency", "0"), "each must be from 1 to 1000"),
        (("--concurrency", "1,a"), "--concurrency takes numbers with commas between them, such as 1,4,16, not '1,a'"),
        (("--rounds", "100000"), "and 100,000 the most: lower --rounds or --calls"),
        (("--api", "responses"), "--api must be chat or completions"),
        (("--param", "max_tokens=3"), "--param max_tokens: a flag or the prompts decide that"),
        (("--param", "seed"), "--param takes NAME=VALUE"),
        (("--param", "x=[1"), "--param x: not readable as YAML"),
        (("--prompt", " "), "--prompt is empty"),
        (("--prompt", "a", "--prompts", "b.txt"), "exclude each other"),
        (("--prompts", "missing.txt"), "--prompts missing.txt: No such file or directory"),
        (("--prompts", "a.csv"), "unknown kind of file; .txt (a prompt a line) and .jsonl can be read"),
        (("--json", "missing/r.json"), "--json missing/r.json: cannot be written there"),
        (("--plot", "."), "--plot .: cannot be written there"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_sent(
    bench: Bench, fake: FakeEndpoint, words: tuple[str, ...], message: str
) -> None:
    done = bench("good", *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not fake.requests


def test_a_plot_without_matplotlib_is_refused_at_once(
    bench: Bench, fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name))
    done = bench("good", "--plot", "r.png")
    assert (done.exit_code, fake.requests) == (2, [])
    assert "--plot needs matplotlib: pip install 'dllm-batch[plot]'" in done.stderr


def test_prompts_of_a_file_keep_their_own_parameters(
    fake: FakeEndpoint, report: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "Hello", "max_new_tokens": 24, "params": {"seed": 3}},
        {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    found = report("good", "--prompts", file, "--param", "temperature=0")
    sent = {body["messages"][0]["content"]: body for body in fake.bodies("good")}
    assert (sent["Hello"]["max_tokens"], sent["Hello"]["seed"], sent["Hello"]["temperature"]) == (24, 3, 0)
    assert sent["Hi"]["max_tokens"] == 5
    assert found["conditions"]["prompts"]["source"] == "p.jsonl"
    assert found["conditions"]["prompts"]["characters"] == [2, 5, 5]


@pytest.mark.parametrize(
    ("content", "api", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "chat", "p.jsonl, line 2: not JSON"),
        ('{"prompt": "a", "max_new_tokens": "b"}', "chat", "line 1: the limit of new tokens must be a whole number"),
        ('{"prompt_token_ids": [1]}', "chat", "prompt 1 of p.jsonl is token ids: use --api completions"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "completions", "is a conversation: use --api chat"),
        ("\n\n", "chat", "no prompt in it"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_sent_is_refused(
    bench: Bench, fake: FakeEndpoint, tmp_path: Path, content: str, api: str, message: str
) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    done = bench("good", "--prompts", "p.jsonl", "--api", api)
    assert (done.exit_code, fake.requests) == (2, [])
    assert message in done.stderr


def test_a_round_takes_its_prompts_from_the_whole_set_and_its_hash_tells_sets_apart(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("\n".join(f"prompt {number}" for number in range(10)))
    found = choose((), file, 1 << 20)
    assert [prompt.content for prompt in found.spread(3)] == ["prompt 0", "prompt 3", "prompt 6"]
    assert found.spread(25)[20:] == found.spread(10)[:5]
    assert (
        found.facts()["sha256"] == choose([str(one.content) for one in found.prompts], None, 1 << 20).facts()["sha256"]
    )
    assert found.facts()["sha256"] != choose(["prompt 0"], None, 1 << 20).facts()["sha256"]


def test_prices_give_the_cost_of_a_thousand_calls(report: Callable[..., dict[str, Any]]) -> None:
    words = ("--price-per-million-input", "100", "--price-per-million-output", "1000", "--price-per-hour", "3600")
    cost = report("good", *words)["levels"][0]["cost_per_thousand_calls"]
    assert cost["by_tokens"] == pytest.approx((10 * 100 + len(WORDS) * 1000) / 1e6 * 1000)
    assert cost["by_hours"] > 0
