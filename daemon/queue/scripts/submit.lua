-- Accepts a job, or attaches to the one that has its id.
-- KEYS  base
-- ARGV  ref, spec, max_queued, most waiting jobs of the tenant (0: any), deadline_ms (0: never), deadline_in_ms or '',
--       longest_queue_ms (0: any), then pairs of field and value: tenant, job_id, model, sla_class, body_hash, ttl_ms ...
-- Gives {'created' | 'attached' | 'conflict', record, 0}, {'late', ms since the deadline, 0}, or
--       {'full' | 'quota', waiting jobs, ms after which to try again}.
-- From  no job -> queued. An existing job, whatever its state, is left as it is.
local MOST_AHEAD_US = 1e14 -- three years: further back no clock is set
local ref, spec, max_queued, quota = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local deadline_ms, longest_queue_ms = tonumber(ARGV[5]), tonumber(ARGV[7])
local given = {}
for i = 8, #ARGV, 2 do
  given[ARGV[i]] = ARGV[i + 1]
end
local now_ms, now_us = clock()
local tenant = tenant_of(ref)

local old = fields(ref, 'state', 'body_hash')
if old and old[1] and old[2] then
  local verdict = old[2] == given.body_hash and 'attached' or 'conflict'
  return { verdict, redis.call('HGETALL', JOB .. ref), 0 }
end

if ARGV[6] ~= '' then
  local then_ms = now_ms + tonumber(ARGV[6])
  deadline_ms = deadline_ms > 0 and math.min(deadline_ms, then_ms) or then_ms
end
if (deadline_ms > 0 or ARGV[6] ~= '') and deadline_ms <= now_ms then
  return { 'late', now_ms - deadline_ms, 0 }
end

local waiting = 0
redis.call('SADD', CLASSES, given.sla_class)
for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
  local number = ask('ZCARD', QUEUE .. class)
  if not number then
    mend({ { QUEUE .. class, 'zset' } }, now_ms)
  end
  waiting = waiting + (number or 0)
end
if waiting >= max_queued then
  return { 'full', waiting, RETRY_MS }
end
if quota > 0 then
  local own = waiting_of(tenant)
  if own >= quota then
    local rest_ms = tonumber(ask('ZSCORE', RESTING .. given.sla_class, tenant) or nil) or 0
    return { 'quota', own, math.max(RETRY_MS, rest_ms - now_ms) }
  end
end

-- Left-overs of an expired job of this name that the sweep has not seen yet, or of something that is no job.
local left = redis.call('EXISTS', unpack(all_keys(ref, count(given.choices)))) > 0
if left and redis.call('EXISTS', JOB .. ref) == 1 then
  garbage(ref, 'a submit found no job record under this name; removed', now_ms)
end
if left or redis.call('ZSCORE', EXPIRING, ref) or redis.call('ZSCORE', LEASES, ref) then
  remove(ref, count(given.choices))
end
local last_us = count(redis.call('GET', CLOCK)) or 0
if last_us > now_us + MOST_AHEAD_US then
  last_us = 0 -- written by hand: arrivals from there on could not be counted up
end
local arrival_us = int(math.max(now_us, last_us + 1))
redis.call('SET', CLOCK, arrival_us)
local record = { 'state', 'queued', 'arrival_us', arrival_us, 'created_ms', int(now_ms), 'queued_ms', int(now_ms) }
for i = 8, #ARGV do
  record[#record + 1] = ARGV[i]
end
local deadline = deadline_ms > 0 and int(math.min(deadline_ms, 2 ^ 53)) or false
local start_by = longest_queue_ms > 0 and int(math.min(now_ms + longest_queue_ms, 2 ^ 53)) or false
for field, value in pairs({ deadline_ms = deadline, start_by_ms = start_by }) do
  if value then
    record[#record + 1] = field
    record[#record + 1] = value
  end
end
redis.call('HSET', JOB .. ref, unpack(record))
redis.call('SET', SPEC .. ref, spec)
enter(ref, { given.sla_class, arrival_us, deadline, start_by, false })
redis.call('ZADD', TENANT .. tenant, arrival_us, ref)
redis.call('HINCRBY', TOTALS, 'submitted', 1)
redis.call('PUBLISH', WAKE, given.sla_class)
return { 'created', record, 0 }
