-- Reads the figures for metrics. Changes nothing.
-- KEYS  base
-- ARGV  none
-- Gives {{class, waiting, time its first has waited in ms, over all stays} ...}, held, dead letters, {counter, value ...}}.
local now_ms = clock()
local classes = {}
for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
  local first = redis.call('ZRANGE', QUEUE .. class, 0, 0)[1]
  local job = first and fields(first, 'queued_ms', 'waited_ms')
  local since_ms, waited_ms = job and count(job[1]) or now_ms, job and count(job[2]) or 0
  classes[#classes + 1] = { class, redis.call('ZCARD', QUEUE .. class), waited_ms + math.max(0, now_ms - since_ms) }
end
return { classes, redis.call('ZCARD', LEASES), redis.call('ZCARD', DEAD), redis.call('HGETALL', TOTALS) }
