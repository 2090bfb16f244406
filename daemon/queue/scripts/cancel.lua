-- Asks for the end of a job.
-- KEYS  base
-- ARGV  ref
-- Gives the record afterwards, or nothing if there is no such job.
-- From  queued -> cancelled. claimed running parked: flagged, its daemon is told. Final: left as it is.
local ref = ARGV[1]
local job = fields(ref, 'state', 'owner')
if not job or not job[1] then
  return false
end
if job[1] == 'queued' then
  redis.call('HSET', JOB .. ref, 'cancel_requested', '1', 'finish_reason', 'cancelled')
  conclude(ref, 'cancelled', (clock()))
elseif LIVE[job[1]] then
  redis.call('HSET', JOB .. ref, 'cancel_requested', '1')
  redis.call('PUBLISH', ORDERS .. (job[2] or ''), ref)
end
return redis.call('HGETALL', JOB .. ref)
