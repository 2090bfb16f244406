-- Extends leases.
-- KEYS  base
-- ARGV  owner, lease_ms, then pairs of ref and epoch
-- Gives {{ref that another claim has or that is gone ...}, {ref to cancel ...}, {ref that was updated ...}}.
-- From  claimed running parked, unchanged. A lease that is over but was not reaped yet is still ours.
local owner, lease_ms = ARGV[1], tonumber(ARGV[2])
local lease_end = int(clock() + lease_ms)
local lost, cancel, updated = {}, {}, {}
for i = 3, #ARGV, 2 do
  local ref = ARGV[i]
  local job = fields(ref, 'state', 'owner', 'epoch', 'cancel_requested', 'updated') or {}
  local why = barred(job[1], job[2], job[3], owner, ARGV[i + 1])
  if why == 'final' and job[3] == ARGV[i + 1] then
    -- ended under this very claim: most likely by its holder, a moment ago
  elseif why then
    lost[#lost + 1] = ref
  else
    redis.call('ZADD', LEASES, lease_end, ref)
    if job[4] == '1' then
      cancel[#cancel + 1] = ref
    end
    if job[5] == '1' then
      updated[#updated + 1] = ref
    end
  end
end
return { lost, cancel, updated }
