-- Asks for the end of a job.
-- KEYS  base
-- ARGV  ref
-- Gives {1 if this ended it else 0, the record afterwards}; an empty record if there is no such job.
-- From  queued -> cancelled. claimed running parked: flagged, its daemon is told. Final: left as it is.
local ref = ARGV[1]
local job = fields(ref, 'state', 'owner')
if not job or not job[1] then
  return { 0, {} }
end
local ended = job[1] == 'queued' and 1 or 0
if ended == 1 then
  redis.call('HSET', JOB .. ref, 'cancel_requested', '1', 'finish_reason', 'cancelled')
  conclude(ref, 'cancelled', (clock()))
elseif LIVE[job[1]] then
  redis.call('HSET', JOB .. ref, 'cancel_requested', '1')
  redis.call('PUBLISH', ORDERS .. (job[2] or ''), ref)
end
return { ended, redis.call('HGETALL', JOB .. ref) }
