-- Estimates the jobs that will be claimed before one, and when it gets its row. Changes nothing.
-- KEYS  base
-- ARGV  ref, classes in order of urgency ...
-- Gives {jobs ahead, estimated start in ms, ms until then}, the last two 0 if it is not known, -1 if it does not wait, or nothing if there is no such job.
-- Of other tenants of its class as many count as stand before it in its own line, and one more where that tenant's
-- turn is before its tenant's: as if all jobs were of one length and all weights equal. Jobs to come don't count.
-- The start: jobs ahead times the pace of their class, one more for itself, and the time from claim to row (pace.lua).
-- Of a tenant at a quota nothing is known: others' jobs say nothing about its.
local MOST_TENANTS = 200 -- beyond, the order of arrival has to do
local FAR_MS = 1e12 -- 31 years: what is later is no estimate
local ref = ARGV[1]
local job = fields(ref, 'state', 'sla_class', 'arrival_us')
if not job or not job[1] then
  return false
elseif job[1] ~= 'queued' then
  return -1
end
local now_ms = clock()
local class, tenant = job[2] or '', tenant_of(ref)
local pace = pace_ms(class, now_ms)

local function ahead_in_class()
  local own = count(job[3]) and ask('ZRANK', line_of(ref, class), place(ref, job[3]))
  local turns = ask('ZRANGE', TURN .. class, 0, MOST_TENANTS) or {}
  if not own or #turns > MOST_TENANTS then
    return ask('ZRANK', QUEUE .. class, ref) or 0
  end
  local before, ahead = 1, own
  for _, other in ipairs(turns) do
    if other == tenant then
      before = 0
    else
      ahead = ahead + math.min(ask('ZCARD', LINE .. class .. '/' .. other) or 0, own + before)
    end
  end
  return ahead
end

local before, before_ms = 0, 0 -- in more urgent classes
for i = 2, #ARGV do
  if ARGV[i] == class then
    break
  end
  local waiting = ask('ZCARD', QUEUE .. ARGV[i]) or 0
  before = before + waiting
  if waiting > 0 and pace then -- A class of which nothing is known is taken to be as fast as its own.
    before_ms = before_ms + waiting * (pace_ms(ARGV[i], now_ms) or pace)
  end
end
local ahead = ahead_in_class()
local lag, left_ms = lag_ms(class), nil
if pace and lag and ask('ZSCORE', TURN .. class, tenant) then
  left_ms = math.min(before_ms + (ahead + 1) * pace + lag, FAR_MS)
end
return { before + ahead, int(left_ms and now_ms + left_ms or 0), int(left_ms or 0) }
