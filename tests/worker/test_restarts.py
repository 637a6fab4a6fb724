"""A worker that lost its device, or whose step does not end, begins anew in the same process, and not for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from redis import Redis

from contract.ledger import Ledger
from contract.paths import Folders
from contract.queues import queue
from tests.checkpoints import llama_block
from worker.progress import Progress
from worker.restarts import COUNT, PREDECESSOR, Restarts, first_line, how_ended, poisons

ROOT = Path(__file__).parent.parent.parent
FAULTY = Path(__file__).parent / "faulty_worker.py"
LIMIT_S = 120.0


# Which errors

POISON = [
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other call",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb)`",
    "Triton Error [CUDA]: an illegal memory access was encountered",
    "HIP error: unspecified launch failure",
]
HARMLESS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "shapes do not match",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
]


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize(("messages", "poisonous"), [(POISON, True), (HARMLESS, False)])
def test_errors_that_leave_no_usable_device_are_told_by_their_message(
    kind: type[Exception], messages: list[str], poisonous: bool
) -> None:
    assert [poisons(kind(message)) for message in messages] == [poisonous] * len(messages)


def test_other_kinds_of_error_are_no_poison() -> None:
    assert not poisons(ValueError("CUDA error: said somebody"))
    assert not poisons(torch.OutOfMemoryError("CUDA out of memory"))
    assert not poisons(KeyboardInterrupt())


def test_only_the_first_line_of_an_error_is_told() -> None:
    assert first_line(torch.AcceleratorError(POISON[0])) == "AcceleratorError: CUDA error: device-side assert triggered"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_an_exit_code_is_told_in_words() -> None:
    assert [how_ended(code) for code in (-9, -77, 1)] == ["signal 9 (SIGKILL)", "signal 77", "exit code 1"]


# In this process


def entered(**values: Any) -> Restarts:
    return Restarts(**{"most": 5, "progress": Progress(), "log": structlog.get_logger(), "line": None, **values})


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """New beginnings, by what they would find in their environment; a real one is for a process of its own."""
    begun: list[str] = []

    def execute(program: str, arguments: list[str]) -> None:
        begun.append(os.environ.pop(COUNT))
        raise SystemExit

    monkeypatch.setattr("worker.restarts.os.execv", execute)
    monkeypatch.setattr("worker.restarts.time.sleep", lambda seconds: begun.append(f"after {seconds:g}"))
    yield begun
    os.environ.pop(COUNT, None)


def fall_ill(restarts: Restarts, finished: int = 0) -> None:
    with restarts:
        restarts._progress.finished = finished
        raise torch.AcceleratorError(POISON[0])


def test_each_new_beginning_in_a_row_waits_twice_as_long(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for in_a_row in range(8):
        monkeypatch.setenv(COUNT, str(in_a_row))
        with pytest.raises(SystemExit):
            fall_ill(entered(most=99))
    waits = [word for word in anew if word.startswith("after")]
    assert waits == ["after 1", "after 2", "after 4", "after 8", "after 16", "after 32", "after 60"]
    assert [word for word in anew if not word.startswith("after")] == [str(number) for number in range(1, 9)]


def test_a_finished_prompt_begins_the_count_again(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "4")
    with pytest.raises(SystemExit):
        fall_ill(entered(), finished=1)
    assert anew[-1] == "1"


def test_a_worker_that_was_told_to_stop_does_not_begin_anew(anew: list[str]) -> None:
    restarts = entered()
    restarts.stop()
    fall_ill(restarts)
    assert anew == []


def test_other_errors_pass(anew: list[str]) -> None:
    with pytest.raises(ValueError, match="something else"), entered():
        raise ValueError("something else")
    assert anew == []


def test_what_was_handed_over_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNT, "2")
    monkeypatch.setenv(PREDECESSOR, "signal 9 (SIGKILL)")
    assert entered().predecessor == "signal 9 (SIGKILL)"
    assert COUNT not in os.environ
    assert PREDECESSOR not in os.environ


def test_no_descriptor_but_the_supervisors_line_reaches_the_new_program(anew: list[str], tmp_path: Path) -> None:
    """One of the device's, kept open, would keep the memory that the old program held there."""
    with (tmp_path / "device").open("w") as device, (tmp_path / "line").open("w") as line:
        for file in (device, line):
            os.set_inheritable(file.fileno(), True)
        with pytest.raises(SystemExit):
            fall_ill(entered(line=line.fileno()))
        assert not os.get_inheritable(device.fileno())
        assert os.get_inheritable(line.fileno())


# In processes of their own


@pytest.fixture
def faulty(folders: Folders, redis_url: str) -> Callable[..., tuple[int, str]]:
    """Run a worker on a faulty engine until no work is left; returns its exit code and the last line of its stderr."""
    llama_block(folders.root / "models" / "tiny")
    settings = {"root": folders.root, "redis_url": redis_url, "model": "tiny", "threads": 1, "dtype": "float32"}

    def run(fault: str, row: str, line: int | None = None, **values: Any) -> tuple[int, str]:
        given = {**settings, "max_rows": 4, "lease_s": 1, "scan_s": 0.1, "name": "w", **values}
        environment = {f"DLLM_{name.upper()}": str(value) for name, value in given.items()}
        done = subprocess.run(
            [sys.executable, str(FAULTY), fault, row, "run", "--burst", *(["--supervisor", str(line)] if line else [])],
            pass_fds=[line] if line else [],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=folders.root,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, (done.stderr.splitlines() or [""])[-1]

    return run


def log(folders: Folders, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folders.logs / "worker-w.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def published(folders: Folders, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folders.outputs / name).read_text().splitlines()]


def answered(folders: Folders) -> list[int]:
    return [int(row["id"].removeprefix("id-")) for row in published(folders, "b.jsonl")]


def test_a_prompt_that_poisons_the_device_is_found_and_its_neighbours_are_answered(
    submit: Callable[..., str], faulty: Callable[..., tuple[int, str]], folders: Folders
) -> None:
    """Twice among its neighbours, once alone: with three new beginnings the work is done, and the culprit named."""
    submit(6, model="tiny")
    code, last = faulty("poison", "b-1", step_timeout_s=60)
    assert (code, "worker_stopped" in last) == (0, True)
    assert answered(folders) == [0, 2, 3, 4, 5]
    (error,) = published(folders, "b.errors.jsonl")
    assert (error["id"], error["error"]["code"], error["error"]["attempts"]) == ("id-1", "worker_crashed", 0)
    assert [event["in_a_row"] for event in log(folders, "process_restarted")] == [1, 2, 1]
    assert not log(folders, "denoise_step_failed")  # to part the rows is of no use without a device
    message = error["error"]["message"]
    assert message.startswith(
        "a worker crashed while this prompt ran, 3 times: w (AcceleratorError: CUDA error: device"
    )
    assert message.count("device-side assert triggered; when last seen step ") == 3


def test_a_device_that_always_fails_ends_the_worker_loudly_and_no_prompt_is_lost(
    redis: Redis, ledger: Ledger, submit: Callable[..., str], faulty: Callable[..., tuple[int, str]], folders: Folders
) -> None:
    submit(6, model="tiny")
    code, last = faulty("poison", "any", max_restarts=2)
    assert code == 1
    assert last == (
        "error: giving up: AcceleratorError: CUDA error: device-side assert triggered; "
        "restarted 2 times in a row without finishing a prompt in between"
    )
    assert [event["in_a_row"] for event in log(folders, "process_restarted")] == [1, 2]
    target = queue(redis, "tiny", "normal")
    waiting = [*redis.lrange(target.key, 0, -1), *redis.lrange(redis.names.backlog("b"), 0, -1)]
    assert sorted(waiting) == [f"b-{index}".encode() for index in range(6)]
    assert not redis.exists(target.started_job_registry.key)
    batch = ledger.get("b")
    assert batch is not None
    assert batch.counts.ended == 0


def test_a_step_that_does_not_end_ends_the_process_and_its_rows_run_again(
    submit: Callable[..., str], faulty: Callable[..., tuple[int, str]], folders: Folders
) -> None:
    """Under a supervisor, whose line outlasts the new beginning: it hears twice that work begins."""
    submit(6, model="tiny")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code, _ = faulty("hang", "b-1", line=theirs.fileno(), step_timeout_s=5)
        assert (code, ours.recv(9)) == (0, b"11")
    assert answered(folders) == list(range(6))
    (event,) = log(folders, "step_timeout")
    assert event["rows"] == 4
    assert "faulty_worker.py" in event["stacks"]
    assert "in hang" in event["stacks"]
    assert [event["in_a_row"] for event in log(folders, "process_restarted")] == [1]
