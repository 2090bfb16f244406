-- Counts the jobs that will be claimed before one. Changes nothing.
-- KEYS  base
-- ARGV  ref, classes in order of urgency ...
-- Gives the number of jobs ahead, -1 if it does not wait, or nothing if there is no such job.
local ref = ARGV[1]
local job = fields(ref, 'state', 'sla_class')
if not job or not job[1] then
  return false
elseif job[1] ~= 'queued' then
  return -1
end
local ahead = 0
for i = 2, #ARGV do
  if ARGV[i] == job[2] then
    break
  end
  ahead = ahead + redis.call('ZCARD', QUEUE .. ARGV[i])
end
return ahead + (redis.call('ZRANK', QUEUE .. job[2], ref) or 0)
