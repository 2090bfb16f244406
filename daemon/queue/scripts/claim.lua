-- Gives waiting jobs to a daemon, most urgent class first, first come first served inside a class.
-- KEYS  base
-- ARGV  owner, lease_ms, limits of tenants, number of held, held refs ..., then pairs of class and limit in order of urgency
-- Gives a list of {ref, record, spec, outputs}; an output a choice, as XRANGE gives it.
-- From  queued -> claimed, epoch + 1.
-- A claim whose reply got lost leaves jobs that this owner has but does not name as held: they are given
-- again under their epoch, so a repeated call loses nothing.
local owner, lease_ms, held_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local GARBAGE_PER_CALL = 100
local now_ms = clock()
local lease_end = int(now_ms + lease_ms)
local given = {}

local function give(ref)
  redis.call('ZADD', LEASES, lease_end, ref)
  local keys, outputs = all_keys(ref), {}
  for i = 3, #keys do
    local entries = redis.pcall('XRANGE', keys[i], '-', '+')
    outputs[#outputs + 1] = entries.err and {} or entries
  end
  local spec = redis.pcall('GET', SPEC .. ref)
  given[#given + 1] = { ref, redis.call('HGETALL', JOB .. ref), spec and not spec.err and spec or false, outputs }
end

-- Whether a queue's member is a job waiting there; if not, it becomes evidence.
local function waiting(ref, class)
  local job = fields(ref, 'state', 'sla_class', 'epoch', 'arrival_us')
  local state = job and job[1]
  if state == 'queued' and job[2] == class and count(job[4]) and (not job[3] or count(job[3])) then
    return true
  elseif LIVE[state] or FINAL[state] or (state == 'queued' and job[2] and job[2] ~= class) then
    garbage(ref, 'queue ' .. class .. ' named a job that does not wait in it; the entry was removed', now_ms)
  else
    garbage(ref, 'queue ' .. class .. ' held something that is no job; removed', now_ms)
    remove(ref)
  end
  return false
end

local held = {}
for i = 5, 4 + held_count do
  held[ARGV[i]] = true
end
for _, ref in ipairs(redis.call('SMEMBERS', OWNER .. owner)) do
  if not held[ref] then
    local job = fields(ref, 'state', 'owner')
    if job and LIVE[job[1]] and job[2] == owner then
      give(ref)
    else
      redis.call('SREM', OWNER .. owner, ref)
    end
  end
end

local rubbish = 0
for i = 5 + held_count, #ARGV, 2 do
  local class, room = ARGV[i], tonumber(ARGV[i + 1])
  mend({ { QUEUE .. class, 'zset' } }, now_ms)
  while room > 0 and rubbish < GARBAGE_PER_CALL do
    local ref = redis.call('ZRANGE', QUEUE .. class, 0, 0)[1]
    if not ref then
      break
    end
    redis.call('ZREM', QUEUE .. class, ref)
    if waiting(ref, class) then
      local queued_ms = count(redis.call('HGET', JOB .. ref, 'queued_ms')) or now_ms
      local waited_ms = count(redis.call('HGET', JOB .. ref, 'waited_ms')) or 0
      local epoch = count(redis.call('HGET', JOB .. ref, 'epoch')) or 0
      redis.call('HSET', JOB .. ref, 'state', 'claimed', 'owner', owner, 'epoch', int(epoch + 1),
        'claimed_ms', int(now_ms), 'waited_ms', int(waited_ms + math.max(0, now_ms - queued_ms)))
      redis.call('SADD', OWNER .. owner, ref)
      redis.call('HINCRBY', TOTALS, 'claimed', 1)
      give(ref)
      room = room - 1
    else
      rubbish = rubbish + 1
    end
  end
end
return { int(now_ms), given }
