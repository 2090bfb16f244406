-- Makes a dead letter of a claimed job that can't be read.
-- KEYS  base
-- ARGV  ref, owner, message
-- Gives 1, or 0 if this owner does not hold it.
-- From  claimed running parked -> dead. The epoch is not asked for: it may be what can't be read.
local ref, owner = ARGV[1], ARGV[2]
local job = fields(ref, 'state', 'owner', 'epoch', 'history')
if not job or not LIVE[job[1]] or job[2] ~= owner then
  return 0
end
local now_ms = clock()
-- Who could not read it is evidence: another release may.
note(ref, job[4], job[3], owner, ARGV[3], now_ms)
conclude_dead(ref, 'BAD_RECORD', ARGV[3], now_ms)
return 1
