"""Between requests and workers: prompts go into the queue, replies come back to whoever waits for them.

One reader for the whole process hands each reply to its request. A request that is left before all of its choices have
ended, for whatever reason, is withdrawn: its rows leave the engine. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from contract import interactive, logs
from contract.interactive import Reply
from contract.jobs import Completion, ErrorRow, PromptJob
from contract.names import Names
from producer.gateway.errors import ApiError, of_failure, timed_out

AT_A_TIME = 32
"""Connections that asking takes at most; each is needed for a moment only."""
PAUSE_S = 1.0
UNREADABLE = "a worker's reply cannot be read: workers and service must be of one version"


@dataclass(frozen=True)
class Part:
    """More of a choice's text; with `end` the last of it. `tokens` is how many the choice has so far."""

    choice: int
    text: str
    tokens: int = 0
    end: Completion | None = None
    refused: bool = False


class Dispatch:
    """The requests of this process that wait, by their ids."""

    def __init__(self, redis: Redis, names: Names) -> None:
        self.service_id = secrets.token_hex(8)
        self.reply_to = interactive.stream_of(names, self.service_id)
        self._redis = redis
        self._names = names
        self._waiting: dict[str, asyncio.Queue[Reply]] = {}
        self._room = asyncio.Semaphore(AT_A_TIME)
        self._leaving: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Hand out replies, for ever."""
        async for reply in interactive.replies(self._redis, self._names, self.service_id):
            if waiting := self._waiting.get(reply.request):
                waiting.put_nowait(reply)

    async def ask(self, model: str, jobs: Sequence[PromptJob], deadline: float) -> Asked:
        """Queue a request. Whoever has it must `close` it; `deadline` is by the event loop's clock."""
        request = jobs[0].batch
        replies = self._waiting[request] = asyncio.Queue[Reply]()
        try:
            async with self._room:
                await interactive.ask(self._redis, self._names, model, jobs)
        except BaseException:  # it may have been queued all the same
            self.leave(model, request, len(jobs), wanted=False)
            raise
        return Asked(self, model, request, len(jobs), replies, deadline)

    def leave(self, model: str, request: str, count: int, wanted: bool) -> None:
        """Nobody waits for the request's replies any more. `wanted` when all of them have come."""
        self._waiting.pop(request, None)
        if not wanted:
            task = asyncio.create_task(self._withdraw(model, request, count))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _withdraw(self, model: str, request: str, count: int) -> None:
        """If the server is away for longer, the rows end by themselves, and nobody reads what they came to."""
        for pause in (0.0, PAUSE_S, PAUSE_S):
            await asyncio.sleep(pause)
            try:
                async with self._room:
                    await interactive.withdraw(self._redis, self._names, model, request, count)
                return
            except RedisError as error:
                logs.get().warning("withdrawal_failed", request=request, reason=str(error))

    async def close(self) -> None:
        """Wait until what was left is withdrawn; nobody reads replies any more."""
        await asyncio.gather(*self._leaving, return_exceptions=True)
        with contextlib.suppress(RedisError):
            await self._redis.delete(self.reply_to)


class Asked:
    """A request that waits for its replies."""

    def __init__(
        self,
        dispatch: Dispatch,
        model: str,
        request: str,
        count: int,
        replies: asyncio.Queue[Reply],
        deadline: float,
    ) -> None:
        self.model = model
        self.request = request
        self.count = count
        self.deadline = deadline
        self._dispatch = dispatch
        self._replies = replies
        self._open = set(range(count))
        self._told = [0] * count

    async def parts(self) -> AsyncIterator[Part]:
        """All choices' texts as they come, in pieces that make up each output; the first may be empty.

        Raises ApiError for a choice that failed, and when the time is over.
        """
        while self._open:
            if part := self._part(await self._next()):
                yield part

    def close(self) -> None:
        """Call when nothing more is wanted. Choices that have not ended are withdrawn."""
        self._dispatch.leave(self.model, self.request, self.count, wanted=not self._open)
        self._open.clear()

    async def _next(self) -> Reply:
        try:
            async with asyncio.timeout_at(self.deadline):
                return await self._replies.get()
        except TimeoutError:
            raise timed_out("the request was not answered in time: ask for less, or raise serve_timeout_s") from None

    def _part(self, reply: Reply) -> Part | None:
        """Raises ApiError for a choice that failed, or a reply that cannot be read; what it holds is told to nobody."""
        try:
            return self._read(reply)
        except (ValidationError, KeyError, ValueError):
            raise ApiError(500, UNREADABLE, kind="server_error", code="unreadable_reply") from None

    def _read(self, reply: Reply) -> Part | None:
        if reply.choice not in self._open:  # a reply that came twice
            return None
        if reply.kind == "failed":
            self._open.discard(reply.choice)
            raise of_failure(ErrorRow.model_validate(reply.data).error)
        if reply.kind == "done":
            self._open.discard(reply.choice)
            end = Completion.model_validate(reply.data)
            return Part(reply.choice, self._new(reply.choice, 0, end.output), end.usage.completion_tokens, end)
        if reply.kind == "block":
            text = self._new(reply.choice, int(reply.data["at"]), str(reply.data["text"]))
            return Part(reply.choice, text, int(reply.data["tokens"])) if text else None
        return Part(reply.choice, "")

    def _new(self, choice: int, at: int, text: str) -> str:
        """What of `text`, which begins at character `at` of the output, has not been told: a row may begin anew.

        Nothing where a piece before it is missing, as after an outage: all of it comes with the end.
        """
        told = self._told[choice]
        new = text[told - at :] if at <= told else ""
        self._told[choice] += len(new)
        return new
