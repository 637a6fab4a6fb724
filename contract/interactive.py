"""Prompts that somebody waits for: a service's requests, on their way to a worker, and what comes back.

They are RQ jobs like all others, so that leases, retries and crash recovery hold for them. Only their way in and their
way out are their own. They have a queue that is taken from first, at any step, and stand in RQ's list of it; no batch
of the ledger, no files. What comes back goes to a stream of the service that asked, and nothing of a request is left
when it has ended: its last reply, the end of its lease and of its job are one step.

    dllm:replies:{service}     stream of a service's replies; it expires LIFE_S after the service's last sign of life,
                               and then whatever the service asked for is wanted by nobody
    dllm:bell:{model}          stream that wakes workers: something was asked, or withdrawn. Who misses it finds out
                               at a heartbeat

Replies may come twice, after an outage, and a row may begin anew, after a crash: texts say where they begin, so that
whoever reads them skips what is known. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Queue, Worker
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from contract.jobs import PromptJob
from contract.names import Connection, Names
from contract.queues import common_fields, lives, newest_life, payload

INTERACTIVE_PREFIX = "chat-"
KEPT_S = 3_600
"""Nobody waits longer: a job that was not taken by then is gone, and so is the bell."""
LIFE_S = 120
"""A service that gave no sign of life for so long is dead."""
SIGN_S = 5.0
"""Seconds between two signs of life, and the longest wait for a reply in one call."""
MOST_REPLIES = 50_000
"""Replies that nobody reads are cut at about so many; who reads takes away what he has read."""
MOST_RINGS = 1_000
PAUSE_S = 0.1
AT_A_TIME = 1_000
AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, BusyLoadingError, OSError)

Kind = Literal["started", "again", "block", "done", "failed"]


@dataclass(frozen=True)
class Reply:
    """What became of a request's choice. `data` by `kind`:

    started   {worker}: the row is in an engine. It may come again: the row was given back, and begins anew
    again     {worker, attempt}: as `started`, for a row that ran before and ended with its worker, or failed
    block     {at, text, tokens, seconds}: the answer from character `at` on is `text`; completion tokens and seconds
              in the engine so far. Texts of one row are pieces of its output, end to end; those of a row that begins
              anew are the same text again, from character 0
    done      a `contract.jobs.Completion`
    failed    a `contract.jobs.ErrorRow`
    """

    request: str
    choice: int
    kind: Kind
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Capacity:
    """What a model's workers can do, and what they have to do for requests at this moment.

    `rows` is how many rows they run together at most, those of batches included; `running` and `waiting` are choices of
    requests; `tokens_per_s` those of all answers in the last minute, which says nothing of workers that were idle.
    """

    workers: int
    rows: int
    running: int
    waiting: int
    tokens_per_s: float


def new_request() -> str:
    """An id for a request: the `batch` of its jobs."""
    return f"{INTERACTIVE_PREFIX}{secrets.token_hex(8)}"


def is_interactive(batch: str) -> bool:
    """Is that the id of a request, and not of a batch?"""
    return re.fullmatch(rf"{INTERACTIVE_PREFIX}[0-9a-f]{{16}}", batch) is not None


def stream_of(names: Names, service_id: str) -> str:
    """Key of a service's replies: the `reply_to` of its jobs."""
    return names.key("replies", service_id)


def bell(names: Names, model: str) -> str:
    return names.key("bell", names.queue(model, "interactive"))


def fields_of(reply: Reply) -> dict[str, str | int]:
    """A reply as it stands in a stream."""
    data = json.dumps(reply.data)
    return {"request": reply.request, "choice": reply.choice, "kind": reply.kind, "data": data}


async def ask(redis: Redis, names: Names, model: str, jobs: Sequence[PromptJob]) -> None:
    """Queue a request's choices, all or none of them. They have `reply_to` in common.

    Raises what redis-py raises while the server is away.
    """
    target = _queue(redis, names, model)
    reply_to = jobs[0].reply_to
    assert reply_to is not None
    assert all(job.reply_to == reply_to for job in jobs)
    rows = [word for job in jobs for word in (job.job_id, f"{job.batch} choice {job.index}", payload(job))]
    keys = [target.key, bell(names, model), reply_to, Queue.redis_queues_keys]
    common = common_fields(target)
    fixed = [KEPT_S, LIFE_S, MOST_RINGS, Job.redis_job_namespace_prefix, len(common), *common]
    await _eval(redis, _ASK, keys, [*fixed, *rows])


async def withdraw(redis: Redis, names: Names, model: str, batch: str, count: int) -> None:
    """Nobody waits for the request any more: its choices leave the queue, or their worker's engine at its next step.

    What has ended stays so. Raises what redis-py raises while the server is away.
    """
    target = _queue(redis, names, model)
    places = [target.key, target.scheduled_job_registry.key, target.started_job_registry.key]
    keys = [*places, names.batch(batch, "starts"), names.key("crashes", batch), bell(names, model)]
    await _eval(redis, _WITHDRAW, keys, [batch, count, KEPT_S, MOST_RINGS, *_patterns(redis)])


def ring(redis: Connection, model: str) -> None:
    """A worker's side: requests lie in the queue again, for whoever has room."""
    key = bell(redis.names, model)
    with redis.pipeline(transaction=True) as pipe:
        pipe.xadd(key, {"asked": 1}, maxlen=MOST_RINGS, approximate=True)
        pipe.expire(key, KEPT_S)
        pipe.execute()


async def replies(redis: Redis, names: Names, service_id: str) -> AsyncIterator[Reply]:
    """The service's replies as they come, for ever; while it is read, the service counts as alive.

    One reader for each service. An outage of the server only delays it. What was read is taken away.
    """
    key, last, signed = stream_of(names, service_id), "0-0", -SIGN_S
    while True:
        try:
            if time.monotonic() - signed >= SIGN_S:
                anew = await _eval(redis, _SIGN, [key], [LIFE_S, last])
                last, signed = ("0-0" if anew else last), time.monotonic()
            found: Any = await redis.xread({key: last}, count=AT_A_TIME, block=int(SIGN_S * 1000))
        except AWAY:
            signed = -SIGN_S
            await asyncio.sleep(PAUSE_S)
            continue
        for entry, fields in entries(found):
            last = entry
            if reply := _reply(fields):
                yield reply


async def capacity(redis: Redis, names: Names, model: str) -> Capacity:
    """From what the workers said at their last heartbeats. Raises what redis-py raises while the server is away."""
    target = _queue(redis, names, model)
    async with redis.pipeline(transaction=False) as pipe:
        pipe.smembers(WORKERS_BY_QUEUE_KEY % target.name)
        pipe.llen(target.key)
        pipe.zcard(target.started_job_registry.key)
        keys, waiting, running = await pipe.execute()
    alive = [life for life in await _lives(redis, names, sorted(map(_text, keys))) if life is not None]

    def total(name: str) -> float:
        return sum(float(life.get(name, 0)) for life in alive)

    return Capacity(len(alive), int(total("most_rows")), running, waiting, round(total("tokens_per_s"), 2))


async def _lives(redis: Redis, names: Names, keys: Sequence[str]) -> list[dict[str, Any] | None]:
    """How the workers of these keys stood at their last heartbeats; None for those that are dead."""
    async with redis.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hexists(key, "birth")
            pipe.hexists(key, "death")
            pipe.hgetall(lives(names, names.plain(key.removeprefix(Worker.redis_worker_namespace_prefix))))
        told = iter(await pipe.execute())
    return [newest_life(life) if born and not died else None for born, died, life in zip(told, told, told, strict=True)]


def _queue(redis: Redis, names: Names, model: str) -> Queue:
    """For its keys and the form of its jobs: it asks nothing of its connection."""
    return Queue(names.queue(model, "interactive"), connection=cast(Any, redis), serializer=JSONSerializer)


def _patterns(redis: Redis) -> list[str]:
    sync = cast(Any, redis)
    return [Job.key_for("%s"), Execution("%s", "%s", sync).key, ExecutionRegistry("%s", sync).key]


async def _eval(redis: Redis, script: str, keys: Sequence[str], words: Sequence[Any]) -> Any:
    return await cast(Any, redis.eval(script, len(keys), *keys, *words))


def entries(found: Any) -> list[tuple[str, dict[str, str]]]:
    """Ids and fields of what XREAD found in one stream, by either protocol."""
    streams = found.values() if isinstance(found, dict) else [entries for _, entries in found or ()]
    flat = [entry for entries in streams for entry in (entries[0] if isinstance(found, dict) else entries)]
    return [(_text(entry), {_text(name): _text(value) for name, value in fields.items()}) for entry, fields in flat]


def _reply(fields: Mapping[str, str]) -> Reply | None:
    """None for what is no reply of ours."""
    with contextlib.suppress(KeyError, ValueError):
        kind, data = cast(Kind, fields["kind"]), json.loads(fields["data"])
        return Reply(fields["request"], int(fields["choice"]), kind, data)
    return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# Lua: a stream lives on for `seconds`; tells whether it had to be made. One without entries is a stream all the same.
_LIVE = """
local function live(key, seconds)
    local anew = redis.call('EXISTS', key) == 0
    if anew then redis.call('XADD', key, 'MAXLEN', 0, '*', 'kind', '') end
    redis.call('EXPIRE', key, seconds)
    return anew
end
"""

# Lua: wakes the workers that listen.
RING = """
local function ring(bell, seconds, most, ...)
    redis.call('XADD', bell, 'MAXLEN', '~', most, '*', ...)
    redis.call('EXPIRE', bell, seconds)
end
"""

# KEYS the queue's list, bell, the service's replies, RQ's set of queues. ARGV seconds that a job is kept, and a service
# lives; most rings; prefix of job keys, number of template words, the template; id, description and data of each job.
# `reply_to` stands beside RQ's fields, so that whoever takes the job sees without reading it whether it is wanted.
_ASK = (
    _LIVE
    + RING
    + """
live(KEYS[3], ARGV[2])
local first = 6 + ARGV[5]
for row = first, #ARGV, 3 do
    local job = ARGV[4] .. ARGV[row]
    redis.call('HSET', job, 'description', ARGV[row + 1], 'data', ARGV[row + 2], 'reply_to', KEYS[3],
        unpack(ARGV, 6, first - 1))
    redis.call('EXPIRE', job, ARGV[1])
    redis.call('RPUSH', KEYS[1], ARGV[row])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('SADD', KEYS[4], KEYS[1])
ring(KEYS[2], ARGV[1], ARGV[3], 'asked', 1)
"""
)

# KEYS the queue's list, scheduled and started jobs, the request's starts and crashes, bell. ARGV the request, number of
# choices, seconds that the bell is kept, most rings; patterns of the keys job, execution, executions.
_WITHDRAW = (
    RING
    + """
for index = 0, ARGV[2] - 1 do
    local id = ARGV[1] .. '-' .. index
    local executions = string.format(ARGV[7], id)
    redis.call('LREM', KEYS[1], 0, id)
    redis.call('ZREM', KEYS[2], id)
    for _, execution in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
        redis.call('ZREM', KEYS[3], id .. ':' .. execution)
        redis.call('DEL', string.format(ARGV[6], id, execution))
    end
    redis.call('DEL', executions, string.format(ARGV[5], id))
end
redis.call('DEL', KEYS[4], KEYS[5])
ring(KEYS[6], ARGV[3], ARGV[4], 'withdrawn', ARGV[1])
"""
)

# KEYS the service's replies. ARGV seconds that it lives, the last entry that was read. Returns 1 when the stream was
# made anew, so that its entries are counted anew.
_SIGN = (
    _LIVE
    + """
if live(KEYS[1], ARGV[1]) then return 1 end
if ARGV[2] ~= '0-0' then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[2]) end
return 0
"""
)
