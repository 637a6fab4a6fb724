"""A worker without an engine: takes requests from the queue as workers do, and answers as it is told to."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from rq import Worker
from rq.job import Job

from contract import interactive, queues
from contract.interactive import Reply
from contract.jobs import PromptJob
from contract.queues import connect

Said = tuple[str, dict[str, Any]]
Script = Callable[[PromptJob], Iterable[Said]]
TEXT = "one two three four five six seven eight"


class ScriptedWorker:
    """One that lives from `with` to its end. `script` says what comes back for a job; it may wait."""

    def __init__(self, redis_url: str, script: Script | None = None, rows: int = 10, model: str = "demo") -> None:
        self.redis = connect(redis_url)
        self.script = script or (lambda job: answered(job))
        self.seen: list[PromptJob] = []
        self.model = model
        self._rows = rows
        self._queue = queues.queue(self.redis, model, "interactive")
        self._registered = Worker([self._queue], connection=self.redis, serializer=self._queue.serializer, name=model)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ScriptedWorker:
        self._registered.register_birth()
        life = {"model": self.model, "most_rows": self._rows, "tokens_per_s": 100.0}
        self.redis.hset(queues.lives(self.redis.names, self.model), "2026-12-02", json.dumps(life))
        self._threads = [threading.Thread(target=self._take, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._registered.register_death()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def waiting(self) -> int:
        """Requests in the queue that nobody has taken."""
        return self.redis.llen(self._queue.key)

    def withdrawn(self) -> int:
        """How often the bell rang for a withdrawal."""
        rings = self.redis.xrange(interactive.bell(self.redis.names, self.model))
        return sum(b"withdrawn" in fields for _, fields in rings)

    def _take(self) -> None:
        while not self._stop.is_set():
            taken = self.redis.lpop(self._queue.key)
            if taken is None:
                time.sleep(0.002)
                continue
            data = self.redis.hget(Job.key_for(taken.decode()), "data")
            job = PromptJob.model_validate(json.loads(zlib.decompress(data))[2][0])
            self.seen.append(job)
            thread = threading.Thread(target=self._answer, args=(job,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, job: PromptJob) -> None:
        for kind, data in self.script(job):
            self.redis.xadd(job.reply_to, interactive.fields_of(Reply(job.batch, job.index, kind, data)))


def answered(job: PromptJob, text: str = TEXT, **values: Any) -> list[Said]:
    """`started`, a block for each word where blocks are wanted, `done`."""
    said: list[Said] = [("started", {"worker": "scripted"})]
    at = 0
    for number, word in enumerate(text.split(" ") if job.stream else ()):
        piece = word if at == 0 else f" {word}"
        said.append(("block", {"at": at, "text": piece, "tokens": number + 1, "seconds": 0.01 * number}))
        at += len(piece)
    return [*said, ("done", done(job, text, **values))]


def done(job: PromptJob, text: str = TEXT, **values: Any) -> dict[str, Any]:
    return {
        "index": job.index,
        "id": job.id,
        "prompt": "",
        "output": text,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": len(text.split())},
        "model": "demo",
        "params": {"seed": job.params.seed or 0},
        "timing": {"queued_s": 0.0, "denoise_s": 0.0},
        "denoise": {"steps": 3, "forwards": 4, "tokens_per_forward": 2.0},
        "worker": "scripted",
        **values,
    }


def failed(job: PromptJob, code: str, message: str = "it failed") -> Said:
    row = {"index": job.index, "id": job.id, "line": 1, "prompt": None}
    return "failed", {**row, "error": {"code": code, "message": message, "attempts": 1}}
