-- Notes that a claimed job has an engine to itself from now on, or no more: if its lease runs out meanwhile, that is its
-- doing and counts as an attempt (reap.lua).
-- KEYS  base
-- ARGV  owner, ref, epoch, '1' | '0'
-- Gives 1, or 0 if this claim does not hold it any more.
-- From  claimed running parked, unchanged.
local owner, ref, epoch = ARGV[1], ARGV[2], ARGV[3]
local job = fields(ref, 'state', 'owner', 'epoch') or {}
if barred(job[1], job[2], job[3], owner, epoch) then
  return 0
end
-- The epoch, not a flag: the next claim begins without.
redis.call('HSET', JOB .. ref, 'alone', ARGV[4] == '1' and epoch or '')
return 1
