"""Redis connection, queue names and enqueuing: what producer and worker must agree on about RQ.

With `contract.interactive` all outside the worker that makes anything of rq. One prompt is one RQ job; the serializer
is JSON, never pickle: whoever can write to Redis must not thereby be able to run code in a worker.

Jobs that are queued here wait in the backlog of their batch (`contract.turns`), not in RQ's list of the queue.

Seams of RQ 3.0 that this module stands on (held by tests/contract/test_queues.py): a job is a hash of
`Job.to_dict()`, its queue a list of ids; the names of a queue's keys and of an execution's; `Retry(interval=0)` makes
RQ's clean-up of an abandoned job put it back on its queue inside one transaction; `FailedJobRegistry.remove`,
`Queue._prepare_for_queue` and `_persist_job`; the set of worker keys, and `Worker.find_by_key`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from redis.backoff import ExponentialWithJitterBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq import Queue, Retry, Worker
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from contract import addresses, turns
from contract.jobs import LANES, LaneName, PromptJob
from contract.names import DEFAULT, Connection, Names

TASK = "worker.tasks.denoise"
RETRIES = 1_000_000
"""RQ's own retry count only has to outlast any number of crashes: attempts are counted in `meta` by the worker."""
FAILURE_TTL_S = 365 * 86_400
RESPONSE_S = 30.0
SCAN = 1_000
LARGEST_JOB = 1 << 28
"""Bytes that a job's data may unpack to: more than the longest line gives (`max_line_mb`), however it is escaped."""


def connect(url: str, prefix: str = DEFAULT) -> Connection:
    """A connection to Redis, for the installation of that prefix, which retries short outages by itself.

    Raises ValueError, which may hold the address, when `url` is none.
    """
    redis = addresses.client(
        url,
        socket_connect_timeout=5.0,
        socket_timeout=RESPONSE_S,
        health_check_interval=15,
        retry=addresses.Patience(ExponentialWithJitterBackoff(cap=2.0, base=0.05), retries=6),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )
    redis.names = Names(prefix)
    return redis


def try_out(redis: Connection) -> None:
    """Do something of every kind that is done later, with keys of ours and of RQ's; leaves nothing behind.

    Raises NoPermissionError where the server's access rules forbid any of it; what else fails is not asked here.
    """
    ours = redis.names.key("probe")
    with redis.pipeline(transaction=False) as pipe:
        for key in (ours, f"{Queue.redis_queue_namespace_prefix}{ours}"):
            for words in _TRIED:
                pipe.execute_command(*words.format(key).split())  # type: ignore[no-untyped-call]
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, NoPermissionError):
            raise answer


_TRIED = (
    *("SET {} 1 PX 1000", "GET {}", "DEL {}", "SETBIT {} 0 1", "BITCOUNT {}", "DEL {}"),
    *("HSET {} field 1", "HGETALL {}", "DEL {}", "RPUSH {} 1", "LRANGE {} 0 0", "DEL {}"),
    *("ZADD {} 1 member", "ZRANGE {} 0 0", "DEL {}", "SADD {} member", "SMEMBERS {}", "DEL {}"),
    *("XADD {} * field 1", "XREAD STREAMS {} 0", "XTRIM {} MAXLEN 0", "DEL {}"),
    *("EVAL return(1) 1 {}", "DISCARD", "UNWATCH", "TIME"),
)


def queues(redis: Connection, model: str) -> list[Queue]:
    """The model's queues, the most urgent first."""
    return [queue(redis, model, lane) for lane in LANES]


def queue(redis: Connection, model: str, lane: LaneName) -> Queue:
    return Queue(redis.names.queue(model, lane), connection=redis, serializer=JSONSerializer)


class WorkerInfo(NamedTuple):
    """A worker whose heartbeat has not run out, and what it told at its last one. Times are seconds since the epoch."""

    name: str
    state: str
    queues: tuple[str, ...]
    last_heartbeat: float | None
    names: Names
    vitals: Mapping[str, Any] = MappingProxyType({})

    def serves(self, model: str) -> bool:
        """Does it take prompts for `model`?"""
        return any(self.names.queue(model, lane) in self.queues for lane in LANES)


def workers(redis: Connection) -> list[WorkerInfo]:
    """The living workers of all models, by name; those of other installations on the server left out."""
    keys = cast("set[bytes]", redis.smembers(Worker.redis_workers_keys))
    found = [_worker(redis, key.decode(errors="replace")) for key in keys]
    return sorted((worker for worker in found if worker), key=lambda worker: worker.name)


def _worker(redis: Connection, key: str) -> WorkerInfo | None:
    """None for a worker that is gone, is of another installation, or is none: whatever stands under its key."""
    try:
        worker = Worker.find_by_key(key, connection=redis, serializer=JSONSerializer)
        if worker is None or not any(map(redis.names.owns, worker.queue_names())):
            return None
        return WorkerInfo(
            name=redis.names.plain(worker.name),
            state=str(worker.get_state()),
            queues=tuple(worker.queue_names()),
            last_heartbeat=worker.last_heartbeat.timestamp() if worker.last_heartbeat else None,
            names=redis.names,
            vitals=_vitals(redis, redis.names.plain(worker.name)),
        )
    except (ValueError, TypeError, LookupError, ResponseError):
        return None


def overdue(redis: Connection, model: str, now: float, by_s: float) -> int:
    """Leases of the model's prompts that ran out more than `by_s` ago, and nobody took the prompts back."""
    with redis.pipeline(transaction=False) as pipe:
        for target in queues(redis, model):
            pipe.zcount(target.started_job_registry.key, "-inf", now - by_s)
        return sum(pipe.execute())


def dead(redis: Connection) -> dict[str, str]:
    """Workers of the last day that did not leave in order and are not there again, and how they ended."""
    alive = {worker.name for worker in workers(redis)}
    found = {}
    for key in redis.scan_iter(match=lives(redis.names, "*"), count=10_000):
        name = key.decode(errors="replace").removeprefix(lives(redis.names, ""))
        if name not in alive:
            found[name] = str(_vitals(redis, name).get("how", "gone without a word"))
    return dict(sorted(found.items()))


def lives(names: Names, worker: str) -> str:
    """Key of a worker's lives: a hash from when a process of that name began to how it stood at its last heartbeat."""
    return names.key("lives", worker)


def _vitals(redis: Connection, worker: str) -> dict[str, Any]:
    """How a worker stood at its last heartbeat; nothing where it did not say."""
    return newest_life(cast("dict[bytes, bytes]", redis.hgetall(lives(redis.names, worker))))


def newest_life(told: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The last of a worker's lives, of those that the hash at `lives` has; nothing where none can be read."""
    try:
        found = json.loads(told[max(told)]) if told else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def depths(redis: Connection, model: str) -> dict[LaneName, int]:
    """Prompts that wait in each of the model's queues, the most urgent first."""
    found = turns.depths(redis, [(target.name, target.key) for target in queues(redis, model)])
    return dict(zip(LANES, found, strict=True))


def enqueuing(target: Queue, jobs: Sequence[PromptJob]) -> Callable[[Pipeline], None]:
    """A function that queues all of `jobs`, which are of one batch, on a pipeline, for `Ledger.advance`.

    Redis ends up with the jobs that `Queue.enqueue_many` would write, empty fields left out. That makes an object and
    sends some fifty words for each job, which is most of the time a large file takes; here the server lays each job
    over a template that is sent once.
    """
    if not jobs:
        return lambda pipe: None
    batch, template = jobs[0].batch, common_fields(target)
    assert all(job.batch == batch for job in jobs)
    rows = [word for job in jobs for word in (job.job_id, f"{job.batch} row {job.index}", payload(job))]

    def enqueue(pipe: Pipeline) -> None:
        pipe.sadd(Queue.redis_queues_keys, target.key)
        keys = _keys(target, batch)
        pipe.eval(_ENQUEUE, len(keys), *keys, batch, Job.redis_job_namespace_prefix, len(template), *template, *rows)

    return enqueue


def _keys(target: Queue, batch: str) -> list[str]:
    names: Names = target.connection.names
    return [names.backlog(batch), names.turns(target.name), names.hours(target.name), names.batch(batch)]


# KEYS backlog, turns, hours, the batch's record; ARGV the batch, prefix of job keys, number of template words, the
# template's names and values, then id, description and data of each job.
_ENQUEUE = (
    turns.JOIN
    + """
local first = 4 + tonumber(ARGV[3])
for row = first, #ARGV, 3 do
    redis.call('HSET', ARGV[2] .. ARGV[row], 'description', ARGV[row + 1], 'data', ARGV[row + 2],
        unpack(ARGV, 4, first - 1))
    redis.call('RPUSH', KEYS[1], ARGV[row])
end
join(KEYS[2], KEYS[3], ARGV[1], KEYS[4])
"""
)

# KEYS as above; ARGV the batch, then ids of jobs.
_STAND = (
    turns.JOIN
    + """
redis.call('RPUSH', KEYS[1], unpack(ARGV, 2))
join(KEYS[2], KEYS[3], ARGV[1], KEYS[4])
"""
)


def common_fields(target: Queue) -> list[Any]:
    """Names and values of the fields that all jobs queued at this moment have in common, as RQ would save them."""
    job = target.create_job(
        TASK, result_ttl=0, failure_ttl=FAILURE_TTL_S, timeout=-1, retry=Retry(max=RETRIES), status=JobStatus.QUEUED
    )
    job.enqueued_at = job.created_at
    fields = {name: value for name, value in job.to_dict().items() if name not in ("data", "description")}
    return [word for name, value in fields.items() if value != "" for word in (name, value)]


def payload(job: PromptJob) -> bytes:
    """The call as RQ's JSON serializer writes it: function, instance, positional and named arguments; compressed."""
    return zlib.compress(f'["{TASK}", null, [{job.model_dump_json(exclude_defaults=True)}], {{}}]'.encode())


def fits(packed: bytes) -> bool:
    """Does what a job holds unpack to no more than `LARGEST_JOB`? A few kilobytes may stand for more than there is."""
    try:
        unpacking = zlib.decompressobj()
        unpacking.decompress(packed, LARGEST_JOB)
    except zlib.error:
        return True  # not packed at all
    return unpacking.eof or not unpacking.unconsumed_tail


def _prompt(data: Any) -> PromptJob | None:
    """The prompt in a job's call; None where there is none that can be read."""
    try:
        return PromptJob.model_validate(json.loads(zlib.decompress(data))[2][0]) if fits(data) else None
    except (TypeError, ValueError, LookupError, RecursionError, zlib.error):
        return None


class Places(NamedTuple):
    """The keys between which the jobs of some batches of a queue move until they end, and those to move them by.

    Ids stand in `lists`; in the sorted sets `sets` they stand alone or before a colon. This is the one list of such
    places: who looks for a job, or takes it out of the queue, looks through all of them.
    """

    lists: tuple[str, ...]
    sets: tuple[str, ...]
    failed: str

    @classmethod
    def of(cls, target: Queue, batches: Iterable[str]) -> Places:
        return cls(
            lists=(target.key, target.intermediate_queue.key, *map(target.connection.names.backlog, batches)),
            sets=(target.started_job_registry.key, target.scheduled_job_registry.key),
            failed=target.failed_job_registry.key,
        )

    @property
    def keys(self) -> list[str]:
        return [*self.lists, *self.sets]


def standing(redis: Connection, target: Queue, batches: Sequence[str]) -> int:
    """How many jobs stand in the queue's places at this moment, backlogs of `batches` included."""
    places = Places.of(target, batches)
    with redis.pipeline(transaction=True) as pipe:
        for key in places.lists:
            pipe.llen(key)
        for key in places.sets:
            pipe.zcard(key)
        return sum(pipe.execute())


def job_ids(redis: Connection, target: Queue, batches: Sequence[str]) -> Iterator[str]:
    """The id of every job of `batches` that stands in the queue's places, some maybe twice, with little memory.

    Jobs move while this goes on, and one may pass unseen from a place not looked at yet to one that was. None is
    missed that stays where it is: lists are read from their ends, because they are emptied at their fronts.
    """
    places = Places.of(target, batches)
    for key in places.lists:
        end = -1
        while found := cast("list[bytes]", redis.lrange(key, end - SCAN + 1, end)):
            yield from (job_id.decode(errors="replace") for job_id in found)
            end -= SCAN
    for key in places.sets:
        for member, _ in redis.zscan_iter(key, count=SCAN):
            yield member.decode(errors="replace").partition(":")[0]


def prompts(redis: Connection, batch: str, indices: Sequence[int]) -> list[PromptJob | None]:
    """The prompts of a batch's rows as their jobs hold them; None for a job that is gone or damaged."""
    with redis.pipeline(transaction=False) as pipe:
        for index in indices:
            pipe.hget(Job.key_for(f"{batch}-{index}"), "data")
        return [_prompt(data) for data in pipe.execute(raise_on_error=False)]


def whereabouts(redis: Connection, job_id: str) -> dict[str, str] | None:
    """What RQ's record of a job says of it: `status`, `worker` and `started_at`, as far as they are there; None where
    there is no job."""
    values = cast("list[bytes | None]", redis.hmget(Job.key_for(job_id), ["status", "worker_name", "started_at"]))
    found = zip(("status", "worker", "started_at"), values, strict=True)
    told = {name: value.decode(errors="replace") for name, value in found if value}
    return told or None


def withdraw(redis: Connection, target: Queue, batch: str, ledger_keys: Sequence[str], rows: Sequence[int]) -> int:
    """Mark those of `rows` that have not ended as cancelled, and take them out of the queue; returns how many.

    `ledger_keys` are the batch's bitmaps in the order of `Mark`, and its starts. Jobs are deleted and leases ended, so
    that whoever runs such a row can end it no more. All of it is one step.
    """
    places = Places.of(target, [batch])
    patterns = [Job.key_for("%s"), Execution("%s", "%s", redis).key, ExecutionRegistry("%s", redis).key]
    keys = [*ledger_keys, *places.keys]
    words = [batch, len(places.lists), *patterns, *rows]
    return cast(int, redis.eval(_WITHDRAW, len(keys), *keys, *words))


def restore(
    redis: Connection,
    target: Queue,
    batch: str,
    bitmaps: Sequence[str],
    rows: Sequence[int],
    jobs: Sequence[PromptJob] = (),
) -> int:
    """Put `rows` and `jobs` at the front of their batch's backlog if they have not ended and stand nowhere; how many.

    `rows` are those whose jobs are there and only lost their place; `jobs` are written anew.
    """
    places, template = Places.of(target, [batch]), common_fields(target)
    keys = [*bitmaps, places.failed, *_keys(target, batch), *places.keys]
    words: list[Any] = [word for index in rows for word in (index, "", "")]
    words += [word for job in jobs for word in (job.index, f"{job.batch} row {job.index}", payload(job))]
    fixed = [batch, len(places.lists), Job.key_for("%s"), len(template), *template]
    return cast(int, redis.eval(_RESTORE, len(keys), *keys, *fixed, *words))


# KEYS the bitmap of each mark, that to be set last; starts, lists, sorted sets. ARGV batch, number of lists; patterns
# of the keys job, execution, executions; row indices.
# What is taken out of a list is overwritten first and removed in one go: so a list is walked through only once.
_WITHDRAW = """
local taken, count = {}, 0
for row = 6, #ARGV do
    local index = ARGV[row]
    if redis.call('GETBIT', KEYS[1], index) + redis.call('GETBIT', KEYS[2], index)
        + redis.call('GETBIT', KEYS[3], index) == 0 then
        local id = ARGV[1] .. '-' .. index
        redis.call('SETBIT', KEYS[3], index, 1)
        redis.call('HDEL', KEYS[4], index)
        redis.call('DEL', string.format(ARGV[3], id), string.format(ARGV[5], id))
        taken[id] = true
        count = count + 1
    end
end
if count == 0 then return 0 end
for place = 5, 4 + ARGV[2] do
    local length, found = redis.call('LLEN', KEYS[place]), false
    for first = 0, length - 1, 1000 do
        for offset, id in ipairs(redis.call('LRANGE', KEYS[place], first, first + 999)) do
            if taken[id] then
                redis.call('LSET', KEYS[place], first + offset - 1, '')
                found = true
            end
        end
    end
    if found then redis.call('LREM', KEYS[place], 0, '') end
end
for place = 5 + ARGV[2], #KEYS do
    for _, member in ipairs(redis.call('ZRANGE', KEYS[place], 0, -1)) do
        local id, execution = string.match(member, '^([^:]*):?(.*)$')
        if taken[id] then
            redis.call('ZREM', KEYS[place], member)
            if execution ~= '' then redis.call('DEL', string.format(ARGV[4], id, execution)) end
        end
    end
end
return count
"""

# KEYS the bitmap of each mark, the failed jobs, backlog, turns, hours, the batch's record, lists, sorted sets. ARGV the
# batch, number of lists, pattern of the key job, number of template words, the template; then index, description and
# data of each row.
_RESTORE = (
    turns.JOIN
    + """
local nowhere, count, first = {}, 0, 5 + ARGV[4]
for row = first, #ARGV, 3 do nowhere[ARGV[1] .. '-' .. ARGV[row]] = true end
for place = 9, 8 + ARGV[2] do
    for start = 0, redis.call('LLEN', KEYS[place]) - 1, 1000 do
        for _, id in ipairs(redis.call('LRANGE', KEYS[place], start, start + 999)) do nowhere[id] = nil end
    end
end
for place = 9 + ARGV[2], #KEYS do
    for _, member in ipairs(redis.call('ZRANGE', KEYS[place], 0, -1)) do
        nowhere[string.match(member, '^[^:]*')] = nil
    end
end
for row = #ARGV - 2, first, -3 do
    local index, data = ARGV[row], ARGV[row + 2]
    local id = ARGV[1] .. '-' .. index
    local job = string.format(ARGV[3], id)
    local ended = redis.call('GETBIT', KEYS[1], index) + redis.call('GETBIT', KEYS[2], index)
        + redis.call('GETBIT', KEYS[3], index)
    if ended == 0 and nowhere[id] and (data ~= '' or redis.call('EXISTS', job) == 1) then
        if data ~= '' then
            redis.call('DEL', job)
            redis.call('HSET', job, 'description', ARGV[row + 1], 'data', data, unpack(ARGV, 5, first - 1))
        end
        redis.call('HSET', job, 'status', 'queued')
        redis.call('PERSIST', job)
        redis.call('ZREM', KEYS[4], id)
        redis.call('LPUSH', KEYS[5], id)
        count = count + 1
    end
end
if count > 0 then join(KEYS[6], KEYS[7], ARGV[1], KEYS[8]) end
return count
"""
)


def failed_jobs(redis: Connection, target: Queue, batch: str, indices: Sequence[int]) -> list[int]:
    """Those of a batch's rows that have a job among the queue's failed ones, and so can be queued again."""
    failed = FailedJobRegistry(queue=target)
    with redis.pipeline(transaction=False) as pipe:
        for index in indices:
            pipe.zscore(failed.key, f"{batch}-{index}")
            pipe.hexists(Job.key_for(f"{batch}-{index}"), "data")
        answers = iter(pipe.execute())
    found = zip(indices, answers, answers, strict=True)
    return [index for index, score, data in found if score is not None and data]


def discard(redis: Connection, target: Queue, batch: str, indices: Sequence[int]) -> int:
    """Delete the failed jobs of those rows of a batch, of which no other can be there any more; returns how many."""
    failed = FailedJobRegistry(queue=target).key
    with redis.pipeline(transaction=True) as pipe:
        for job_id in (f"{batch}-{index}" for index in indices):
            pipe.zrem(failed, job_id)
            pipe.delete(Job.key_for(job_id), ExecutionRegistry(job_id, redis).key)
        return sum(pipe.execute()[::2])


def requeuing(redis: Connection, target: Queue, job_ids: Iterable[str]) -> Callable[[Pipeline], None]:
    """A function that queues failed jobs, all of one batch, again on a pipeline, with their attempts forgotten."""
    found = [job for job in Job.fetch_many(list(job_ids), redis, serializer=JSONSerializer) if job]
    failed = FailedJobRegistry(queue=target)

    def requeue(pipe: Pipeline) -> None:
        for job in found:
            job.meta, job._exc_info = {}, None
            failed.remove(job, pipeline=pipe)
            # Saving leaves out what is empty, so the old values and the failed job's expiry have to be taken away.
            pipe.hdel(job.key, "meta", "exc_info")
            pipe.persist(job.key)
            target._prepare_for_queue(job)
            target._persist_job(job, pipe)
        if found:
            batch = found[0].id.rpartition("-")[0]
            keys = _keys(target, batch)
            pipe.eval(_STAND, len(keys), *keys, batch, *(job.id for job in found))

    return requeue
