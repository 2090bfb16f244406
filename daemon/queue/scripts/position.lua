-- Estimates the jobs that will be claimed before one. Changes nothing.
-- KEYS  base
-- ARGV  ref, classes in order of urgency ...
-- Gives the number of jobs ahead, -1 if it does not wait, or nothing if there is no such job.
-- Of other tenants of its class as many count as stand before it in its own line, and one more where that tenant's
-- turn is before its tenant's: as if all jobs were of one length and all weights equal. Jobs to come don't count.
local MOST_TENANTS = 200 -- beyond, the order of arrival has to do
local ref = ARGV[1]
local job = fields(ref, 'state', 'sla_class', 'arrival_us')
if not job or not job[1] then
  return false
elseif job[1] ~= 'queued' then
  return -1
end
local class, tenant = job[2] or '', tenant_of(ref)
local ahead = 0
for i = 2, #ARGV do
  if ARGV[i] == class then
    break
  end
  ahead = ahead + (ask('ZCARD', QUEUE .. ARGV[i]) or 0)
end
local own = count(job[3]) and ask('ZRANK', line_of(ref, class), place(ref, job[3]))
local turns = ask('ZRANGE', TURN .. class, 0, MOST_TENANTS) or {}
if not own or #turns > MOST_TENANTS then
  return ahead + (ask('ZRANK', QUEUE .. class, ref) or 0)
end
local before = 1
ahead = ahead + own
for _, other in ipairs(turns) do
  if other == tenant then
    before = 0
  else
    ahead = ahead + math.min(ask('ZCARD', LINE .. class .. '/' .. other) or 0, own + before)
  end
end
return ahead
