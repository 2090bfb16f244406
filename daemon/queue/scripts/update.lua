-- Moves a job to another class, or gives it another deadline. Its arrival stays. The daemon that runs it is told.
-- KEYS  base
-- ARGV  ref, class it is thought to be in, class it shall be in, deadline_ms ('': as it is), longest_queue_ms (0: any)
-- Gives {'done' | 'state' | 'moved', record}, {'late', ms since the deadline}, or {'missing'}.
-- From  queued -> queued; claimed running parked, unchanged. A job that has ended, or is in another class than was
--       thought, is left as it is.
local ref, from, to, deadline_ms, longest_queue_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local job = fields(ref, 'state', 'sla_class', 'arrival_us', 'created_ms', 'owner')
if not job or not job[1] then
  return { 'missing' }
elseif (job[1] ~= 'queued' and not LIVE[job[1]]) or not count(job[3]) then
  return { 'state', redis.call('HGETALL', JOB .. ref) }
elseif job[2] ~= from then
  return { 'moved', redis.call('HGETALL', JOB .. ref) }
end
local now_ms = clock()
if deadline_ms ~= '' and tonumber(deadline_ms) <= now_ms then
  return { 'late', now_ms - tonumber(deadline_ms) }
end

local waits = job[1] == 'queued'
if waits then
  leave(ref, from, job[3])
end
if deadline_ms ~= '' then
  redis.call('HSET', JOB .. ref, 'deadline_ms', deadline_ms)
end
if from ~= to then
  local start_by_ms = longest_queue_ms > 0 and (count(job[4]) or now_ms) + longest_queue_ms or 0
  redis.call('SADD', CLASSES, to)
  redis.call('HSET', JOB .. ref, 'sla_class', to, 'start_by_ms', int(start_by_ms))
end
if waits then
  enter(ref)
  redis.call('PUBLISH', WAKE, to)
else
  redis.call('HSET', JOB .. ref, 'updated', '1') -- renewals repeat it until the next claim
  redis.call('PUBLISH', ORDERS .. (job[5] or ''), 'update ' .. ref)
end
redis.call('PUBLISH', NEWS .. ref, 'updated')
return { 'done', redis.call('HGETALL', JOB .. ref) }
