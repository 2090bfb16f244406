-- Gives a claimed job back, with its tokens, to its old place in the queue.
-- KEYS  base
-- ARGV  owner, ref, epoch, charge ('1': this claim counts as an attempt), why, max_attempts
-- Gives 'queued' | 'cancelled' (a cancel waited for it) | 'dead' (attempts used up) | 'refused'.
-- From  claimed running parked -> queued | cancelled | dead.
local owner, ref, charge = ARGV[1], ARGV[2], ARGV[4] == '1'
local job = fields(ref, 'state', 'owner', 'epoch', 'handed_back') or {}
if barred(job[1], job[2], job[3], owner, ARGV[3]) then
  return 'refused'
end
redis.call('HINCRBY', TOTALS, 'handed_back', 1)
if not charge then
  note_return(ref, job[4])
end
return requeue(ref, charge, ARGV[5], tonumber(ARGV[6]), (clock()))
