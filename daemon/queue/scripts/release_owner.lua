-- Gives back whatever a daemon still holds, uncharged: the last act of a drain.
-- KEYS  base
-- ARGV  owner
-- Gives the refs it held.
-- From  claimed running parked -> queued | cancelled.
local owner = ARGV[1]
local released = {}
local now_ms = clock()
for _, ref in ipairs(redis.call('SMEMBERS', OWNER .. owner)) do
  local job = fields(ref, 'state', 'owner', 'handed_back')
  if job and LIVE[job[1]] and job[2] == owner then
    redis.call('HINCRBY', TOTALS, 'handed_back', 1)
    note_return(ref, job[3])
    requeue(ref, false, 'released', 0, now_ms)
    released[#released + 1] = ref
  end
end
redis.call('DEL', OWNER .. owner)
return released
