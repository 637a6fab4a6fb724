"""The Lua scripts by which jobs change their place: each is one step that happens wholly or not at all.

Those that begin with CLOCK know `now`, the server's time in seconds.
"""

from contract.turns import TURNS

CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
"""

# Queues the scheduled jobs that are due. Returns how many there were.
PROMOTE = """
local function promote(scheduled, waiting, job_key, limit)
  local due = redis.call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    local job = string.format(job_key, id)
    redis.call('ZREM', scheduled, id)
    if redis.call('EXISTS', job) == 1 then redis.pcall('HSET', job, 'status', 'queued') end
    redis.call('RPUSH', waiting, id)
  end
  return #due
end
"""

# KEYS for each queue, that of requests first: waiting, intermediate, started, scheduled, turns, hours.
# ARGV room for rows of batches, room for all rows, lease seconds, worker, its executions key, time as text, the most
# starts that are counted here; patterns of the keys job, execution, executions, done, failed, cancelled, starts, batch,
# backlog; what the ids of these executions begin with.
# Returns for each job: queue number, id, execution id, hash or false, whether it ended, starts with this one (0: the
# ledger's keys of its batch are of other types than ours).
# Should the script fail halfway, what it popped lies in the intermediate list and is found by REPAIR.
# Jobs of requests that nobody waits for any more are deleted: their service is gone, or their time was over.
TAKE = (
    CLOCK
    + PROMOTE
    + TURNS
    + """
local room, most, lease, worker, our_executions, time, counted_here = unpack(ARGV, 1, 7)
local job_key, execution_key, executions_key, done, failed, cancelled, starts_key, batch_key, backlog_key, name =
  unpack(ARGV, 8, 17)
room, most, lease, counted_here = tonumber(room), tonumber(most), tonumber(lease), tonumber(counted_here)
local taken, of_batches = {}, 0

local function abandoned(job)
  local reply_to = redis.pcall('HGET', job, 'reply_to')
  return type(reply_to) ~= 'string' or redis.call('EXISTS', reply_to) == 0
end

local function forget(id, job, intermediate)
  local request, choice = string.match(id, '^(.+)%-(%d+)$')
  if request then redis.call('HDEL', string.format(starts_key, request), choice) end
  redis.call('DEL', job)
  redis.call('LREM', intermediate, -1, id)
end

local function counted(batch, index)
  local ended = 0
  for _, mark in ipairs({done, failed, cancelled}) do
    ended = ended + redis.call('GETBIT', string.format(mark, batch), index)
  end
  local counts = string.format(starts_key, batch)
  local starts = tonumber(redis.call('HGET', counts, index) or 0) + 1
  if starts <= counted_here then redis.call('HINCRBY', counts, index, 1) end
  local known = string.format(batch_key, batch)
  if redis.call('HEXISTS', known, 'spec') == 1 then redis.call('HSETNX', known, 'started_at', now) end
  return ended, starts
end

local function lease_out(q, id, job, intermediate, started)
  local hash = redis.pcall('HGETALL', job)
  if hash.err then hash = false end
  local execution = name .. #taken
  local member = id .. ':' .. execution
  local record, executions = string.format(execution_key, id, execution), string.format(executions_key, id)
  redis.call('ZADD', started, now + lease, member)
  redis.call('HSET', record, 'id', execution, 'job_id', id, 'created_at', now, 'last_heartbeat', now,
             'worker_name', worker)
  redis.call('PEXPIRE', record, math.ceil(lease * 1000))
  if type(redis.pcall('ZADD', executions, now + lease + 60, execution)) == 'table' then
    redis.call('DEL', executions)  -- nobody's who has to do with jobs
    redis.call('ZADD', executions, now + lease + 60, execution)
  end
  redis.call('PEXPIRE', executions, math.ceil(lease * 1000) + 60000)
  redis.call('SADD', our_executions, member)
  redis.call('PEXPIRE', our_executions, math.ceil(lease * 1000) + 60000)
  if hash and #hash > 0 then
    redis.call('HSET', job, 'status', 'started', 'worker_name', worker, 'started_at', time, 'last_heartbeat', time)
  end
  local batch, index = string.match(id, '^(.+)%-(%d+)$')
  local ended, starts = 0, 1
  if batch and #index < 10 then
    local sound, marks, count = pcall(counted, batch, index)
    if sound then ended, starts = marks, count else starts = 0 end
  end
  taken[#taken + 1] = {q, id, execution, hash, ended, starts}
  redis.call('LREM', intermediate, -1, id)
end

for q = 1, #KEYS / 6 do
  local waiting, intermediate, started, scheduled, turns, hours = unpack(KEYS, 6 * q - 5, 6 * q)
  local of_requests = q == 1
  if not of_requests and room == 0 then break end
  promote(scheduled, waiting, job_key, 100)
  look(turns, hours, batch_key, backlog_key, 100)
  while #taken < most and (of_requests or of_batches < room) do
    local id = redis.call('LMOVE', waiting, intermediate, 'LEFT', 'RIGHT')
      or next_row(turns, hours, backlog_key, intermediate)
    if not id then break end
    local job = string.format(job_key, id)
    if of_requests and abandoned(job) then
      forget(id, job, intermediate)
    else
      lease_out(q, id, job, intermediate, started)
      if not of_requests then of_batches = of_batches + 1 end
    end
  end
end
return taken
"""
)

# KEYS as for TAKE. Returns 1 when no row waits, but for those of batches outside their hours.
EMPTY = (
    CLOCK
    + """
for q = 1, #KEYS, 6 do
  local rows = redis.call('LLEN', KEYS[q]) + redis.call('LLEN', KEYS[q + 1]) + redis.call('ZCARD', KEYS[q + 3])
  if rows + redis.call('ZCARD', KEYS[q + 4]) + redis.call('ZCOUNT', KEYS[q + 5], '-inf', now) > 0 then return 0 end
end
return 1
"""
)

# Counts the start of a suspect, unless its lease is lost. KEYS started, starts; ARGV member, row index.
START = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
return 1
"""

# KEYS for each row: started, execution, executions. ARGV lease seconds; for each row its member and execution id.
# Returns the execution ids of the rows whose lease is lost.
RENEW = (
    CLOCK
    + """
local lease, lost = tonumber(ARGV[1]), {}
for row = 1, #KEYS / 3 do
  local started, record, executions = KEYS[3 * row - 2], KEYS[3 * row - 1], KEYS[3 * row]
  local member, execution = ARGV[2 * row], ARGV[2 * row + 1]
  if redis.call('ZSCORE', started, member) then
    redis.call('ZADD', started, now + lease, member)
    redis.call('HSET', record, 'last_heartbeat', now)
    redis.call('PEXPIRE', record, math.ceil(lease * 1000))
    redis.call('ZADD', executions, now + lease + 60, execution)
    redis.call('PEXPIRE', executions, math.ceil(lease * 1000) + 60000)
  else
    lost[#lost + 1] = execution
  end
end
return lost
"""
)

# KEYS waiting, intermediate, started, scheduled, first seen in the intermediate list.
# ARGV lease seconds, most jobs at a time; patterns of the keys job, execution, executions.
# Returns how many jobs were due and how many had an expired lease; the ids of those put back for that, and of those
# that were stranded in the intermediate list.
REPAIR = (
    CLOCK
    + PROMOTE
    + """
local waiting, intermediate, started, scheduled, seen = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lease, limit = tonumber(ARGV[1]), tonumber(ARGV[2])

local function leased(id)
  for _, execution in ipairs(redis.pcall('ZRANGE', string.format(ARGV[5], id), 0, -1)) do  -- of another type: none
    if redis.call('ZSCORE', started, id .. ':' .. execution) then return true end
  end
  return false
end

local function put_back(id)
  local job = string.format(ARGV[3], id)
  if redis.call('EXISTS', job) == 1 then redis.pcall('HSET', job, 'status', 'queued') end
  redis.call('LPUSH', waiting, id)
end

local returned = {}
local expired = redis.call('ZRANGEBYSCORE', started, '-inf', now, 'LIMIT', 0, limit)
for place = #expired, 1, -1 do
  local id, execution = string.match(expired[place], '^(.*):(.*)$')
  redis.call('ZREM', started, expired[place])
  if id then
    redis.call('DEL', string.format(ARGV[4], id, execution))
    redis.call('ZREM', string.format(ARGV[5], id), execution)
    local status = redis.pcall('HGET', string.format(ARGV[3], id), 'status')
    -- Any other status was set by whoever put the job elsewhere already; without one the job is damaged or gone.
    if (type(status) ~= 'string' or status == 'started') and not leased(id) then
      put_back(id)
      returned[#returned + 1] = id
    end
  end
end

local stranded, present = {}, {}
for _, id in ipairs(redis.call('LRANGE', intermediate, 0, -1)) do
  local first = redis.call('ZSCORE', seen, id)
  if leased(id) then
    redis.call('LREM', intermediate, 1, id)
  elseif first and now - first > lease then
    redis.call('LREM', intermediate, 1, id)
    put_back(id)
    stranded[#stranded + 1] = id
  else
    present[id] = true
    redis.call('ZADD', seen, 'NX', now, id)
  end
end
for _, id in ipairs(redis.call('ZRANGE', seen, 0, -1)) do
  if not present[id] then redis.call('ZREM', seen, id) end
end

return {promote(scheduled, waiting, ARGV[3], limit), #expired, returned, stranded}
"""
)

# The scripts that end a lease share KEYS started, execution, executions, worker's executions, job, done, failed,
# starts, target, cancelled, and ARGV member, execution id, row index, job id; what follows is each script's own.
# `release` gives up the lease, or tells that somebody else has the row. `over` tells that the row has ended: then its
# job is deleted when it is done or cancelled, and kept for a retry when it failed.
RELEASE = (
    CLOCK
    + """
local job, starts, target, id = KEYS[5], KEYS[8], KEYS[9], ARGV[4]

local function release()
  if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return false end
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[2])
  redis.call('SREM', KEYS[4], ARGV[1])
  return true
end

local function over()
  if redis.call('GETBIT', KEYS[6], ARGV[3]) + redis.call('GETBIT', KEYS[10], ARGV[3]) > 0 then
    redis.call('DEL', job)
    redis.call('HDEL', starts, ARGV[3])
    return true
  end
  return redis.call('GETBIT', KEYS[7], ARGV[3]) == 1
end

local function exists()
  return redis.call('EXISTS', job) == 1
end
"""
)

# target: replies of the service that asked. ARGV[5] the most of them, [6] … names and values of the reply.
# Nothing of the request is left. A service that is gone has no replies any more, and gets none.
ANSWER = (
    RELEASE
    + """
if not release() then return 0 end
redis.call('DEL', job)
redis.call('HDEL', starts, ARGV[3])
if #ARGV > 5 and redis.call('EXISTS', target) == 1 then
  redis.call('XADD', target, 'MAXLEN', '~', ARGV[5], '*', unpack(ARGV, 6))
end
return 1
"""
)

FINISH = (
    RELEASE
    + """
if not release() then return 0 end
if over() and exists() then redis.pcall('HSET', job, 'status', 'failed') end
return 1
"""
)

# target: failed registry. ARGV[5] seconds that a failed job is kept, [6] time as text, [7] compressed message.
# A hash that is no hash is of no use to anybody and would make every tool that lists the failed jobs stumble.
FAIL = (
    RELEASE
    + """
if not release() then return 0 end
if redis.call('GETBIT', KEYS[6], ARGV[3]) == 1 or redis.call('TYPE', job).ok ~= 'hash'
   or redis.call('HEXISTS', job, 'data') == 0 then
  redis.call('DEL', job)
  return 1
end
redis.call('HSET', job, 'status', 'failed', 'ended_at', ARGV[6], 'exc_info', ARGV[7])
redis.call('EXPIRE', job, ARGV[5])
redis.call('ZADD', target, now + tonumber(ARGV[5]), id)
return 1
"""
)

# target: scheduled registry. ARGV[5] delay in seconds, [6] status, [7] meta.
RETRY = (
    RELEASE
    + """
if not release() then return 0 end
redis.call('HDEL', starts, ARGV[3])
if over() then return 1 end
if exists() then redis.call('HSET', job, 'status', ARGV[6], 'meta', ARGV[7]) end
redis.call('ZADD', target, now + tonumber(ARGV[5]), id)
return 1
"""
)

# target: waiting list. ARGV[5] 1 when the start is to be taken back; else the job goes on naming the worker of it.
GIVE_BACK = (
    RELEASE
    + """
if not release() then return 0 end
local uncounted = ARGV[5] == '1'
if uncounted and redis.call('HINCRBY', starts, ARGV[3], -1) <= 0 then redis.call('HDEL', starts, ARGV[3]) end
if over() then return 1 end
if exists() then
  redis.pcall('HSET', job, 'status', 'queued')
  if uncounted then redis.pcall('HDEL', job, 'started_at', 'worker_name') end
end
redis.call('LPUSH', target, id)
return 1
"""
)
