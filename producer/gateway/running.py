"""A request from its admission to its last word: limits, filters, the queue, and the client's patience.

Chat, completions and `/generate` are this, with different words around it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fastapi import Request

from contract.jobs import Completion, Prompt, PromptJob
from contract.sampling import SamplingParams
from producer.gateway import asking
from producer.gateway.dispatch import Asked, Part
from producer.gateway.door import GONE
from producer.gateway.errors import ApiError, bad_request, too_large
from producer.gateway.filters import Filters, whole_words
from producer.gateway.limits import Caller
from producer.gateway.service import Service

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """What a body asks for, judged."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    n: int = 1
    stream: bool = False


class Running:
    """A request under way; whoever has it must `close` it."""

    def __init__(self, asked: Asked, judges: Filters, caller: Caller, slots: contextlib.ExitStack) -> None:
        self.asked = asked
        self._judges = judges
        self._caller = caller
        self._slots = slots

    def parts(self) -> AsyncIterator[Part]:
        """As `Asked.parts`; a choice whose text is refused has no more of it, and ends as `refused`."""
        return judged(self.asked.parts(), self._judges, self._caller.name) if self._judges.known else self.asked.parts()

    async def ends(self) -> list[Part]:
        """The last part of each choice, in their order."""
        ends = [part async for part in self.parts() if part.end]
        return sorted(ends, key=lambda part: part.choice)

    def close(self) -> None:
        self._slots.close()


async def begin(request: Request, here: Service, caller: Caller, wanted: Wanted) -> Running:
    """Admit a request and queue it. Raises ApiError when it may not run, or not now."""
    here.limits.count(caller)
    _refuse_many_large(wanted, here.settings.serve_max_body_mb << 20)
    await _judge(wanted.prompts, here.filters, caller.name)
    jobs = asking.jobs_of(wanted.prompts, wanted.params, here.dispatch.reply_to, wanted.n, wanted.stream)
    _note(request, here, wanted, jobs)
    measured = await here.capacity(wanted.model)
    deadline = asyncio.get_running_loop().time() + here.settings.serve_timeout_s
    slots = contextlib.ExitStack()
    slots.enter_context(here.limits.running(caller, wanted.model, len(jobs), measured))
    try:
        asked = await here.dispatch.ask(wanted.model, jobs, deadline)
    except BaseException:
        slots.close()
        raise
    slots.callback(asked.close)
    return Running(asked, here.filters, caller, slots)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """`work`, but given up as soon as the client has gone away."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ApiError(GONE, "the client went away")
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def judged(parts: AsyncIterator[Part], judges: Filters, caller: str) -> AsyncIterator[Part]:
    """`parts` in which no text is passed on that the filters have not seen as whole words."""
    texts: dict[int, str] = {}
    sent: dict[int, int] = {}
    refused: set[int] = set()
    async for part in parts:
        text = texts[part.choice] = texts.get(part.choice, "") + part.text
        known = sent.get(part.choice, 0)
        ripe = text if part.end else whole_words(text)
        if part.choice not in refused and len(ripe) > known and await judges.output(ripe, caller):
            refused.add(part.choice)
        if part.choice in refused:
            if part.end:
                yield replace(part, text="", refused=True)
        elif len(ripe) > known or part.end or not part.text:
            sent[part.choice] = max(known, len(ripe))
            yield replace(part, text=ripe[known:])


def _refuse_many_large(wanted: Wanted, most: int) -> None:
    """Each choice has a copy of its prompt in Redis."""
    size = sum(len(asking.text_of(prompt) or prompt) for prompt in wanted.prompts)
    if wanted.n > 1 and size * wanted.n > most:
        raise too_large(f"{wanted.n} choices of so long a prompt are more than {most:,} characters", "n")


async def _judge(prompts: Sequence[Prompt], judges: Filters, caller: str) -> None:
    for prompt in prompts if judges.known else ():
        text = asking.text_of(prompt)
        if text is None:
            raise bad_request("token ids cannot be read by this service's filters: send text", "prompt")
        if why := await judges.prompt(text, caller):
            raise bad_request(f"the prompt is refused: {why}", code="content_filter")


def _note(request: Request, here: Service, wanted: Wanted, jobs: Sequence[PromptJob]) -> None:
    """What the audit log keeps of it."""
    told = {"model": wanted.model, "prompt_job": jobs[0].batch, "choices": len(jobs), "stream": wanted.stream}
    if here.settings.log_prompts:
        told["prompts"] = [asking.text_of(prompt) for prompt in wanted.prompts]
    request.state.entry.told |= told


def note_end(request: Request, here: Service, ends: Sequence[Completion], counted: dict[str, int]) -> None:
    """What the audit log keeps of an answer."""
    told = request.state.entry.told
    told["usage"] = counted
    if here.settings.log_prompts:
        told["outputs"] = [end.output for end in ends]


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection. The body has been read by then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
