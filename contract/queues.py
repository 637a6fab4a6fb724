"""Redis connection, queue names and enqueuing: what producer and worker must agree on about RQ.

The only module besides `worker/intake.py` that imports rq. One prompt is one RQ job; the serializer is JSON, never
pickle: whoever can write to Redis must not thereby be able to run code in a worker.

Jobs that are queued here wait in the backlog of their batch (`contract.turns`), not in RQ's list of the queue.

Seams of RQ 3.0 that this module stands on (held by tests/contract/test_queues.py): a job is a hash of
`Job.to_dict()`, its queue a list of ids; `Retry(interval=0)` makes RQ's clean-up of an abandoned job put it back on its
queue inside one transaction; `FailedJobRegistry.remove(pipeline=…)`; `Queue._prepare_for_queue` and `_persist_job`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as RedisRetry
from rq import Queue, Retry, Worker
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from contract import turns
from contract.jobs import PRIORITIES, Priority, PromptJob
from contract.ledger import Ledger

TASK = "worker.tasks.denoise"
RETRIES = 1_000_000
"""RQ's own retry count only has to outlast any number of crashes: attempts are counted in `meta` by the worker."""
FAILURE_TTL_S = 365 * 86_400
RESPONSE_S = 30.0


def connect(url: str) -> Redis:
    """A connection to Redis that answers in bytes, as RQ needs, and retries short outages by itself."""
    return Redis.from_url(
        url,
        socket_connect_timeout=5.0,
        socket_timeout=RESPONSE_S,
        health_check_interval=15,
        retry=RedisRetry(ExponentialWithJitterBackoff(cap=2.0, base=0.05), retries=6),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )


def queue_name(model: str, priority: Priority) -> str:
    """`dllm-{model}-{priority}` with anything but letters, digits, dot and dash replaced by `_`."""
    return f"dllm-{re.sub(r'[^A-Za-z0-9.-]', '_', model)}-{priority}"


def queues(redis: Redis, model: str) -> list[Queue]:
    """The model's queues, the most urgent first."""
    return [queue(redis, model, priority) for priority in PRIORITIES]


def queue(redis: Redis, model: str, priority: Priority) -> Queue:
    return Queue(queue_name(model, priority), connection=redis, serializer=JSONSerializer)


class WorkerInfo(NamedTuple):
    """A worker whose heartbeat has not run out. Times are seconds since the epoch."""

    name: str
    state: str
    queues: tuple[str, ...]
    last_heartbeat: float | None

    def serves(self, model: str) -> bool:
        """Does it take prompts for `model`?"""
        return any(queue_name(model, priority) in self.queues for priority in PRIORITIES)


def workers(redis: Redis) -> list[WorkerInfo]:
    """The living workers of all models, by name."""
    found = [
        WorkerInfo(
            name=worker.name,
            state=str(worker.get_state()),
            queues=tuple(worker.queue_names()),
            last_heartbeat=worker.last_heartbeat.timestamp() if worker.last_heartbeat else None,
        )
        for worker in Worker.all(connection=redis, serializer=JSONSerializer)
    ]
    return sorted(found)


def depths(redis: Redis, model: str) -> dict[Priority, int]:
    """Prompts that wait in each of the model's queues, the most urgent first."""
    found = turns.depths(redis, [(target.name, target.key) for target in queues(redis, model)])
    return dict(zip(PRIORITIES, found, strict=True))


def enqueuing(target: Queue, jobs: Sequence[PromptJob]) -> Callable[[Pipeline], None]:
    """A function that queues all of `jobs`, which are of one batch, on a pipeline, for `Ledger.advance`.

    Redis ends up with the jobs that `Queue.enqueue_many` would write, empty fields left out. That makes an object and
    sends some fifty words for each job, which is most of the time a large file takes; here the server lays each job
    over a template that is sent once.
    """
    if not jobs:
        return lambda pipe: None
    batch, template = jobs[0].batch, _template(target)
    assert all(job.batch == batch for job in jobs)
    rows = [word for job in jobs for word in (job.job_id, f"{job.batch} row {job.index}", _data(job))]

    def enqueue(pipe: Pipeline) -> None:
        pipe.sadd(Queue.redis_queues_keys, target.key)
        keys = _keys(target, batch)
        pipe.eval(_ENQUEUE, len(keys), *keys, batch, Job.redis_job_namespace_prefix, len(template), *template, *rows)

    return enqueue


def _keys(target: Queue, batch: str) -> list[str]:
    return [turns.backlog(batch), turns.turns(target.name), turns.hours(target.name), Ledger.key(batch)]


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


def _template(target: Queue) -> list[Any]:
    """Names and values of the fields that all jobs queued at this moment have in common, as RQ would save them."""
    job = target.create_job(
        TASK, result_ttl=0, failure_ttl=FAILURE_TTL_S, timeout=-1, retry=Retry(max=RETRIES), status=JobStatus.QUEUED
    )
    job.enqueued_at = job.created_at
    fields = {name: value for name, value in job.to_dict().items() if name not in ("data", "description")}
    return [word for name, value in fields.items() if value != "" for word in (name, value)]


def _data(job: PromptJob) -> bytes:
    """The call as RQ's JSON serializer writes it: function, instance, positional and named arguments; compressed."""
    return zlib.compress(f'["{TASK}", null, [{job.model_dump_json(exclude_defaults=True)}], {{}}]'.encode())


def failed_jobs(redis: Redis, target: Queue, batch: str, indices: Sequence[int]) -> list[int]:
    """Those of a batch's rows that have a job among the queue's failed ones, and so can be queued again."""
    failed = FailedJobRegistry(queue=target)
    with redis.pipeline(transaction=False) as pipe:
        for index in indices:
            pipe.zscore(failed.key, f"{batch}-{index}")
            pipe.hexists(Job.key_for(f"{batch}-{index}"), "data")
        answers = iter(pipe.execute())
    found = zip(indices, answers, answers, strict=True)
    return [index for index, score, data in found if score is not None and data]


def requeuing(redis: Redis, target: Queue, job_ids: Iterable[str]) -> Callable[[Pipeline], None]:
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
