-- An operator lets a dead job run again, from its committed tokens and with fresh attempts.
-- KEYS  base
-- ARGV  ref
-- Gives 1, or 0 if there is no such dead job.
-- From  dead -> queued.
local ref = ARGV[1]
local job = fields(ref, 'state', 'sla_class', 'arrival_us')
if not job or job[1] ~= 'dead' or not job[2] or not count(job[3]) then
  return 0
end
local now_ms = clock()
redis.call('ZREM', DEAD, ref)
redis.call('HDEL', EVIDENCE, ref)
redis.call('HSET', JOB .. ref, 'state', 'queued', 'attempts', 0, 'lapses', 0, 'queued_ms', int(now_ms), 'finished_ms', 0,
  'error_reason', '', 'error_message', '')
enter(ref)
redis.call('PUBLISH', WAKE, job[2])
return 1
