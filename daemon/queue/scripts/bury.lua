-- Makes a dead letter of a claimed job that can't be read.
-- KEYS  base
-- ARGV  ref, owner, message
-- Gives 1, or 0 if this owner does not hold it.
-- From  claimed running parked -> dead. The epoch is not asked for: it may be what can't be read.
local ref, owner = ARGV[1], ARGV[2]
local job = fields(ref, 'state', 'owner')
if not job or not LIVE[job[1]] or job[2] ~= owner then
  return 0
end
conclude_dead(ref, 'BAD_RECORD', ARGV[3], (clock()))
return 1
