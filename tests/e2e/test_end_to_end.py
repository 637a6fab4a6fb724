"""The installed commands as a user runs them, in processes of their own: drop, submit, kill, stop, look."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, cast

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contract import queues, server
from contract.ledger import Counts, Ledger
from contract.settings import ProducerSettings
from tests.e2e.system import START_S, System


def test_dropped_files_become_outputs_and_both_commands_stop_in_order(
    system: System, wait_until: Callable[..., None]
) -> None:
    watch, work = system.start("producer", "watch"), system.start("worker", "run", "--max-rows", "4")
    (system.folders.inputs / "questions.txt").write_text("one\n\ntwo\r\nthree\n")
    (system.folders.inputs / "rows.jsonl").write_text('{"prompt": "a", "id": "x"}\nnot json\n{"prompt": "b"}\n')
    results = [system.folders.outputs / name for name in ("questions.jsonl", "rows.jsonl")]
    wait_until(lambda: all(file.exists() for file in results), START_S)
    assert [row["prompt"] for row in system.rows("questions.jsonl")] == ["one", "two", "three"]
    assert [row["id"] for row in system.rows("rows.jsonl")] == ["x", "2"]
    (error,) = system.rows("rows.errors.jsonl")
    assert (error["line"], error["error"]["code"]) == (2, "bad_json")
    text = (system.folders.outputs / "questions.txt").read_text()
    assert text.startswith("> one\n")
    wait_until(lambda: {file.name for file in system.folders.processed.iterdir()} == {"questions.txt", "rows.jsonl"})
    assert not [file for file in system.folders.inputs.iterdir() if file.is_file()]
    for process in (watch, work):
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    throughput = [event for event in system.log("worker-*.jsonl") if event["event"] == "batch_throughput"]
    assert sum(event["rows"] for event in throughput) == 5


def test_others_see_how_worker_and_producer_stand(system: System, wait_until: Callable[..., None]) -> None:
    """Metrics and health over HTTP: while it loads, while it works, when Redis is gone."""
    port = free_ports(2)
    watch = system.start("producer", "watch", "--metrics-port", str(port + 1))
    work = system.start("worker", "run", "--max-rows", "4", "--metrics-port", str(port))
    loading = (503, {"ok": False, "problems": ["the worker is loading"]})
    wait_until(lambda: status(port, "readyz") == loading, START_S)
    assert status(port, "healthz") == (200, {"ok": True, "problems": []})
    wait_until(lambda: status(port, "readyz")[0] == 200 and status(port + 1, "readyz")[0] == 200, START_S)
    rows = [{"prompt": f"prompt {number}", "max_new_tokens": 16} for number in range(6)]
    rows += [{"prompt": "long " * 1000}]
    (system.folders.inputs / "six.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wait_until((system.folders.outputs / "six.jsonl").exists, START_S)
    wait_until(lambda: scraped(port)["dllm_rows_in_flight", ""] == 0)
    told, queues_told = scraped(port), scraped(port + 1)
    assert told["dllm_rows_finished_total", ""] == 6
    assert told["dllm_rows_failed_total", "prompt_too_long"] == 1
    tokens = sum(row["usage"]["completion_tokens"] for row in system.rows("six.jsonl"))
    assert told["dllm_output_tokens_total", ""] == tokens
    forwards = sum(row["denoise"]["forwards"] for row in system.rows("six.jsonl"))
    assert told["dllm_row_forwards_total", ""] == forwards
    assert told["dllm_step_seconds_count", "denoise"] > 0
    assert told["process_resident_memory_bytes", ""] > 1 << 20
    assert (queues_told["dllm_redis_up", ""], queues_told["dllm_workers", "tiny"]) == (1, 1)
    server.stop(ProducerSettings(root=system.root))
    wait_until(lambda: "Redis has not answered" in str(status(port, "readyz")), START_S)
    wait_until(lambda: status(port + 1, "readyz") == (503, {"ok": False, "problems": ["Redis does not answer"]}))
    assert (status(port, "healthz")[0], status(port + 1, "healthz")[0]) == (200, 200)
    assert watch.poll() is work.poll() is None


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody has at this moment."""
    while True:
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first = int(probes[0].getsockname()[1])
            with contextlib.suppress(OSError, OverflowError):
                for number, probe in enumerate(probes[1:], start=1):
                    probe.bind(("127.0.0.1", first + number))
                return first


def status(port: int, path: str) -> tuple[int, Any]:
    """What a health check answers; 0 while nobody does."""
    try:
        answer = httpx2.get(f"http://127.0.0.1:{port}/{path}")
    except httpx2.TransportError:
        return 0, None
    return answer.status_code, answer.json()


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Metrics by name and the value of their first label."""
    families = text_string_to_metric_families(httpx2.get(f"http://127.0.0.1:{port}/metrics").text)
    values = [one for family in families for one in family.samples]
    return {(one.name, next(iter(one.labels.values()), "")): one.value for one in values}


def test_a_killed_worker_loses_nothing_and_doubles_nothing(system: System, wait_until: Callable[..., None]) -> None:
    """Two workers, one killed while it holds rows: every prompt ends exactly once, and nobody is to blame."""
    ledger = system.ledger()
    workers = [system.start("worker", "run", "--max-rows", "8", "--name", f"w{number}") for number in range(2)]
    wait_until(lambda: len(queues.workers(ledger.redis)) == 2, START_S)
    prompts = [{"prompt": f"prompt {number}", "max_new_tokens": 96} for number in range(300)]
    batch = system.submit("many.jsonl", prompts)
    wait_until(lambda: {worker.state for worker in queues.workers(ledger.redis)} == {"busy"}, START_S)
    workers[0].kill()
    workers[0].wait()
    assert not (system.folders.outputs / "many.jsonl").exists()
    wait_until((system.folders.outputs / "many.jsonl").exists, START_S)
    rows = system.rows("many.jsonl")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in prompts]
    assert not (system.folders.outputs / "many.errors.jsonl").exists()
    record = ledger.get(batch)
    assert record is not None
    assert (record.counts.done, record.counts.failed) == (300, 0)
    assert "rows_put_back" in {event["event"] for event in system.log("worker-w1.jsonl")}
    assert (system.root / "many.jsonl").exists()  # submitted, not dropped: the user's own file stays


def test_one_command_keeps_a_worker_alive_on_each_device(system: System, wait_until: Callable[..., None]) -> None:
    """Both work; one that is killed comes back, and every prompt ends exactly once; both stop in order."""
    ledger = system.ledger()
    port = free_ports(2)
    flags = ["--name", "box", "--max-rows", "8", "--metrics-port", str(port)]
    supervisor = system.start("worker", "run", "--device", "cpu,cpu", *flags)

    def states() -> dict[str, str]:
        return {worker.name: worker.state for worker in queues.workers(ledger.redis)}

    def pid(name: str) -> int:
        return int(cast(bytes, ledger.redis.hget(f"rq:worker:{name}", "pid") or b"0"))

    wait_until(lambda: states().keys() == {"box-0", "box-1"}, START_S)
    prompts = [{"prompt": f"prompt {number}", "max_new_tokens": 96} for number in range(150)]
    batch = system.submit("many.jsonl", prompts)
    wait_until(lambda: states() == {"box-0": "busy", "box-1": "busy"}, START_S)
    killed = pid("box-0")
    os.kill(killed, signal.SIGKILL)
    wait_until((system.folders.outputs / "many.jsonl").exists, START_S)
    assert [row["prompt"] for row in system.rows("many.jsonl")] == [row["prompt"] for row in prompts]
    assert not (system.folders.outputs / "many.errors.jsonl").exists()
    record = ledger.get(batch)
    assert record is not None
    assert (record.counts.done, record.counts.failed) == (150, 0)
    wait_until(lambda: pid("box-0") not in (0, killed) and len(states()) == 2, START_S)
    wait_until(lambda: [status(port + number, "readyz")[0] for number in range(2)] == [200, 200], START_S)
    lives = [json.loads(life) for life in cast("list[bytes]", ledger.redis.hvals("dllm:lives:box-0"))]
    assert [life["how"] for life in lives if "how" in life] == ["signal 9 (SIGKILL)"]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=30) == 0
    assert states() == {}
    assert [event["code"] for event in system.log("worker-box.jsonl") if event["event"] == "child_died"] == [-9]


def test_workers_stop_when_their_supervisor_is_killed(system: System, wait_until: Callable[..., None]) -> None:
    ledger = system.ledger()
    supervisor = system.start("worker", "run", "--device", "cpu,cpu", "--name", "box")
    wait_until(lambda: len(queues.workers(ledger.redis)) == 2, START_S)
    supervisor.kill()
    wait_until(lambda: not queues.workers(ledger.redis), START_S)
    # Each says so last of all.
    wait_until(lambda: [event["event"] for event in system.log("worker-box-*.jsonl")].count("worker_stopped") == 2)


def test_burst_on_several_devices_ends_when_no_work_is_left(system: System) -> None:
    system.submit("few.jsonl", [{"prompt": f"prompt {number}", "max_new_tokens": 8} for number in range(20)])
    done = system.call("worker", "run", "--device", "cpu,cpu", "--burst")
    assert done.returncode == 0, done.stderr
    assert len(system.rows("few.jsonl")) == 20


def test_a_folder_of_tables_is_answered_with_its_columns_beside_the_answers(system: System) -> None:
    folder = system.root / "data" / "below"
    folder.mkdir(parents=True)
    (folder / "rows.csv").write_text('key;question;topic\nk1;"one;\ntwo";x\nk2;three;y\nk1;four;z\n')
    (folder / "rows.params.yaml").write_text("max_new_tokens: 8\n")
    (system.root / "ask.txt").write_text("{topic}: {question}\n")
    names = ["--id-column", "key", "--csv-delimiter", ";", "--template", "ask.txt"]
    assert system.call("producer", "submit", "data", "--recursive", *names).returncode == 0
    done = system.call("worker", "run", "--burst")
    assert done.returncode == 0, done.stderr
    rows = system.rows("below/rows.jsonl")
    assert [(row["id"], row["prompt"]) for row in rows] == [("k1", "x: one;\ntwo"), ("k2", "y: three")]
    assert rows[0]["metadata"] == {"question": "one;\ntwo", "topic": "x"}
    assert {row["params"]["max_new_tokens"] for row in rows} == {8}
    (error,) = system.rows("below/rows.errors.jsonl")
    assert (error["line"], error["metadata"]["topic"], error["error"]["code"]) == (5, "z", "duplicate_id")
    moved = sorted(file.name for file in (system.folders.processed / "below").iterdir())
    assert moved == ["rows.csv", "rows.params.yaml"]


def test_submit_with_wait_tells_by_its_exit_code_whether_all_went_well(system: System) -> None:
    system.start("worker", "run")
    good = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8},
        }
        for number in (3, 1, 2)
    ]
    (system.root / "openai_batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in good))
    waited = system.call("producer", "submit", "openai_batch.jsonl", "--wait")
    assert waited.returncode == 0, waited.stderr
    assert [row["id"] for row in system.rows("openai_batch.jsonl")] == ["request-3", "request-1", "request-2"]

    with (system.root / "openai_batch.jsonl").open("a") as file:
        file.write('{"custom_id": "broken", \n')
    waited = system.call("producer", "submit", "openai_batch.jsonl", "--wait", "--name", "second")
    assert waited.returncode == 1
    assert [row["id"] for row in system.rows("second.jsonl")] == ["request-3", "request-1", "request-2"]
    (error,) = system.rows("second.errors.jsonl")
    assert (error["line"], error["error"]["code"]) == (4, "bad_json")
    batch = json.loads(system.call("producer", "status", "--json").stdout)["batches"][0]["batch"]
    shown = system.call("producer", "failed", batch)
    assert "bad_json" in shown.stdout
    assert "make the line one complete JSON object" in shown.stdout


def test_generate_answers_one_prompt_without_a_queue(system: System) -> None:
    answer = ("worker", "generate", "a question", "--max-new-tokens", "24", "--denoise-steps", "20")
    printed = system.call(*answer)
    assert printed.returncode == 0, printed.stderr
    assert "tokens/s" in printed.stderr
    assert system.call(*answer, "--output-file", "out.txt").stdout == ""
    assert (system.root / "out.txt").read_text() == printed.stdout
    assert not system.folders.redis.exists()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["run", "--model", "absent"], "no model 'absent'"),
        (["generate", "hello", "--rule", "threshold", "--factor", "1"], "factor belongs to rule 'factor'"),
        (["run", "--device", "cpu,,cpu"], "a name is missing at a comma"),
        (["generate", "hello", "--device", "all,cpu"], "'all' stands alone"),
        (["generate", "hello", "--rule", "treshold"], "rule"),
        (["generate", ""], "empty"),
        (["generate", "hello", "--top-p", "7"], "top_p"),
    ],
)
def test_a_mistake_is_told_in_one_line(system: System, command: list[str], told: str) -> None:
    answered = system.call("worker", *command)
    assert answered.returncode in (1, 2)
    assert told in answered.stderr
    assert "Traceback" not in answered.stderr
    assert len(answered.stderr.strip().splitlines()) == 1


def test_check_names_what_is_wrong(system: System) -> None:
    fine = system.call("worker", "check")
    assert fine.returncode == 0, fine.stdout
    assert "llama_block_diffusion" in fine.stdout
    (system.root / "models" / "tiny" / "model.safetensors").unlink()
    broken = system.call("worker", "check")
    assert broken.returncode == 1
    assert "FAIL  model" in broken.stdout


def test_a_batch_is_cancelled_while_a_worker_runs_it(system: System, wait_until: Callable[..., None]) -> None:
    """The worker drops its rows and goes on with others; every prompt is in one file, once."""
    ledger = system.ledger()
    worker = system.start("worker", "run", "--max-rows", "4")
    rows = [{"id": f"r{number:03}", "prompt": f"prompt {number}", "max_new_tokens": 150} for number in range(400)]
    batch = system.submit("rows.jsonl", rows)
    wait_until(lambda: counted(ledger, batch).done >= 3, START_S)
    cancelled = system.call("producer", "cancel", batch, "--json")
    assert cancelled.returncode == 0, cancelled.stderr
    counts = counted(ledger, batch)
    assert counts.cancelled == json.loads(cancelled.stdout)["cancelled"] > 0
    assert counts.done + counts.cancelled == 400
    done, errors = ([row["id"] for row in system.rows(f"rows{end}")] for end in (".jsonl", ".errors.jsonl"))
    assert done == sorted(done)
    assert errors == sorted(errors)
    assert sorted(done + errors) == [row["id"] for row in rows]
    after = system.submit("after.jsonl", [{"prompt": "another"}])
    wait_until(lambda: (system.folders.outputs / "after.jsonl").exists())
    assert counted(ledger, after).done == 1
    assert counted(ledger, batch) == counts
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=30) == 0


def test_a_batch_whose_worker_was_killed_is_cancelled_at_once(system: System, wait_until: Callable[..., None]) -> None:
    """Nobody needs to be alive for it, no lease to run out."""
    ledger = system.ledger()
    system.environment |= {"DLLM_LEASE_S": "600"}
    worker = system.start("worker", "run", "--max-rows", "4")
    batch = system.submit("rows.jsonl", [{"prompt": f"prompt {n}", "max_new_tokens": 150} for n in range(100)])
    wait_until(lambda: counted(ledger, batch).done >= 3, START_S)
    worker.kill()
    worker.wait()
    assert system.call("producer", "cancel", batch).returncode == 0
    counts = counted(ledger, batch)
    assert counts.done + counts.cancelled == 100
    assert len(system.rows("rows.jsonl")) == counts.done
    assert len(system.rows("rows.errors.jsonl")) == counts.cancelled
    told = system.call("producer", "doctor")
    assert (told.returncode, told.stdout) == (0, "all is well\n")


def counted(ledger: Ledger, batch: str) -> Counts:
    found = ledger.get(batch)
    assert found is not None
    return found.counts
