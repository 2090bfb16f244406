-- An operator throws a dead letter away, with the job if there is one.
-- KEYS  base
-- ARGV  name
-- Gives 1, or 0 if there is no such dead letter.
-- From  dead -> no job.
local name = ARGV[1]
if redis.call('ZREM', DEAD, name) == 0 then
  return 0
end
redis.call('HDEL', EVIDENCE, name)
local job = fields(name, 'state')
if job and job[1] == 'dead' then
  remove(name)
end
return 1
