-- Takes jobs from daemons whose leases are over, fails those that wait past their time, and sweeps what has expired.
-- Any daemon may run it at any time; it needs no lock, being one atomic step (D9).
-- KEYS  base
-- ARGV  max_attempts, limit (of each kind), dead_ttl_ms
-- Gives {{requeued ...}, {cancelled ...}, {dead ...}, {late ...}, number swept}.
-- From  claimed running parked -> queued | cancelled | dead; queued -> failed. A job that ended is never touched (D7).
-- A lease that ran out says nothing about a job among others: a power cut takes them all. It counts as an attempt only
-- if the job was being tried alone; else it is noted as a lapse (docs/adr/0006).
local max_attempts, limit, dead_ttl_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local now_ms = clock()
redis.call('HINCRBY', TOTALS, 'reaps', 1) -- Always a write: a server that can't is noticed though nothing happens.
local outcome = { queued = {}, cancelled = {}, dead = {}, late = {} }
local swept = 0

mend({
  { LEASES, 'zset' }, { DUE, 'zset' }, { EXPIRING, 'zset' }, { DEAD, 'zset' }, { EVIDENCE, 'hash' },
  { TOTALS, 'hash' }, { CLASSES, 'set' }, { CLOCK, 'string' },
}, now_ms)
for _, ref in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', int(now_ms), 'LIMIT', 0, limit)) do
  local job = fields(ref, 'state', 'epoch', 'alone', 'lapses', 'owner', 'history')
  if job and LIVE[job[1]] then
    redis.call('HINCRBY', TOTALS, 'reaped', 1)
    local alone = job[3] and job[3] == job[2]
    if not alone then
      redis.call('HSET', JOB .. ref, 'lapses', int((count(job[4]) or 0) + 1))
      note(ref, job[6], job[2], job[5], 'the lease ran out; not charged', now_ms)
    end
    local came_to = requeue(ref, alone, 'the lease ran out while it was tried alone', max_attempts, now_ms)
    table.insert(outcome[came_to], ref)
  else
    end_claim(ref)
    if not job or not job[1] then
      garbage(ref, 'a lease named something that is no job; removed', now_ms)
    end
  end
end

for _, ref in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', int(now_ms), 'LIMIT', 0, limit)) do
  local job = fields(ref, 'state', 'sla_class', 'deadline_ms', 'start_by_ms', 'started_ms')
  local due = job and job[1] == 'queued' and job[2] and due_of(job[3], job[4], job[5])
  if due and due <= now_ms then
    conclude_late(ref, due, now_ms)
    table.insert(outcome.late, ref)
  else
    redis.call('ZREM', DUE, ref)
  end
end

for _, ref in ipairs(redis.call('ZRANGEBYSCORE', EXPIRING, '-inf', int(now_ms), 'LIMIT', 0, limit)) do
  local job = fields(ref, 'state', 'expires_ms')
  if not job or not job[1] or (FINAL[job[1]] and (count(job[2]) or 0) <= now_ms) then
    remove(ref)
    swept = swept + 1
  else
    redis.call('ZREM', EXPIRING, ref)
  end
end

local old = int(now_ms - dead_ttl_ms)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', DEAD, '-inf', old, 'LIMIT', 0, limit)) do
  redis.call('ZREM', DEAD, name)
  redis.call('HDEL', EVIDENCE, name)
  local job = fields(name, 'state')
  if job and job[1] == 'dead' then
    remove(name)
  end
  swept = swept + 1
end
forget_counters()
return { outcome.queued, outcome.cancelled, outcome.dead, outcome.late, swept }
