"""Whose row is next: the batches of a queue take turns, a row each, so that a long one does not starve a short one.

Rows that a producer queues stand in their batch's own backlog. The batch stands once in its queue's turns, scored by
when it comes, and goes to the end of them each time a row of it is taken. A batch with hours of its own
(`contract.hours`) stands in the turns only while it may run: whoever takes rows first looks at those whose time has
come, by the server's clock. Batches without rows stand nowhere. All of it changes in the scripts that move the rows.

    dllm:batch:{id}:backlog    list of job ids in the order of the rows
    dllm:turns:{queue}         sorted set of the batches that wait for their turn
    dllm:hours:{queue}         sorted set of the batches with hours and rows, by when to look at them again

RQ's own list of a queue is served before the turns. It holds rows that were taken before: retries that are due, rows
given back, rows of dead workers; and those of versions that knew no turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from contract.hours import STRETCH
from contract.names import Connection

# Lua: gives a batch that has got rows a turn after all others, unless it waits for one already. Where it has hours,
# the next look at them does.
JOIN = """
local function last_turn(turns)
  return tonumber(redis.call('ZRANGE', turns, -1, -1, 'WITHSCORES')[2] or 0)
end

local function join(turns, hours, batch, record)
  if redis.call('HEXISTS', record, 'hours') == 1 then
    redis.call('ZADD', hours, 'NX', 0, batch)
  else
    redis.call('ZADD', turns, 'NX', last_turn(turns) + 1, batch)
  end
end
"""

# Lua, after CLOCK: `look` lets batches in whose hours have begun, and out those whose hours are over. `next_row` moves
# the row whose turn it is to `target` and returns its id; false when there is none.
TURNS = (
    STRETCH
    + JOIN
    + """
local function look(turns, hours, batch_key, backlog_key, limit)
  for _, batch in ipairs(redis.call('ZRANGEBYSCORE', hours, '-inf', now, 'LIMIT', 0, limit)) do
    local text = redis.call('HGET', string.format(batch_key, batch), 'hours')
    local opens, closes = now, math.huge
    if text then opens, closes = open_stretch(text, now) end
    if redis.call('EXISTS', string.format(backlog_key, batch)) == 0 then
      redis.call('ZREM', turns, batch)
      redis.call('ZREM', hours, batch)
    elseif opens > now then
      redis.call('ZREM', turns, batch)
      redis.call('ZADD', hours, opens, batch)
    else
      redis.call('ZADD', turns, 'NX', last_turn(turns) + 1, batch)
      redis.call('ZADD', hours, closes, batch)
    end
  end
end

local function next_row(turns, hours, backlog_key, target)
  while true do
    local batch = redis.call('ZRANGE', turns, 0, 0)[1]
    if not batch then return false end
    local backlog = string.format(backlog_key, batch)
    local id = redis.call('LMOVE', backlog, target, 'LEFT', 'RIGHT')
    if redis.call('EXISTS', backlog) == 1 then
      redis.call('ZADD', turns, last_turn(turns) + 1, batch)
    else
      redis.call('ZREM', turns, batch)
      redis.call('ZREM', hours, batch)
    end
    if id then return id end
  end
end
"""
)

# KEYS for each queue: RQ's list, turns, hours. ARGV the pattern of backlogs' keys. Returns how many rows wait in each.
_DEPTHS = """
local depths = {}
for q = 1, #KEYS, 3 do
  local depth, counted = redis.call('LLEN', KEYS[q]), {}
  for place = q + 1, q + 2 do
    for _, batch in ipairs(redis.call('ZRANGE', KEYS[place], 0, -1)) do
      if not counted[batch] then depth = depth + redis.call('LLEN', string.format(ARGV[1], batch)) end
      counted[batch] = true
    end
  end
  depths[#depths + 1] = depth
end
return depths
"""


def depths(redis: Connection, queues: Sequence[tuple[str, str]]) -> list[int]:
    """How many rows wait in each of `queues` (name and key of RQ's list) at this moment, in backlogs too."""
    names = redis.names
    keys = [key for name, waiting in queues for key in (waiting, names.turns(name), names.hours(name))]
    return cast("list[int]", redis.eval(_DEPTHS, len(keys), *keys, names.backlog("%s")))


def waiting(redis: Connection, batches: Sequence[str]) -> list[int]:
    """How many rows of each batch nobody has taken yet."""
    with redis.pipeline(transaction=False) as pipe:
        for batch in batches:
            pipe.llen(redis.names.backlog(batch))
        return cast("list[int]", pipe.execute())
