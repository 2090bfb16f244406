-- Reads the figures for metrics. Changes nothing.
-- KEYS  base
-- ARGV  none
-- Gives {{class, waiting, age of its first's stay in ms} ...}, held, dead letters, {counter, value ...}}.
local now_ms = clock()
local classes = {}
for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
  local first = redis.call('ZRANGE', QUEUE .. class, 0, 0)[1]
  local job = first and fields(first, 'queued_ms')
  local since_ms = job and count(job[1]) or now_ms
  classes[#classes + 1] = { class, redis.call('ZCARD', QUEUE .. class), math.max(0, now_ms - since_ms) }
end
return { classes, redis.call('ZCARD', LEASES), redis.call('ZCARD', DEAD), redis.call('HGETALL', TOTALS) }
