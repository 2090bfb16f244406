-- Gives waiting jobs to a daemon: most urgent class first, there the tenant with the smallest counter, there the job
-- due first, then the oldest (line.lua). Tenants at a quota are skipped.
-- KEYS  base
-- ARGV  owner, lease_ms, JSON {tenant: [weight, running, tokens per minute]} or '', number of held, held refs ...,
--       then pairs of class and limit in order of urgency
-- Gives {now_ms, list of {ref, record, spec, outputs}}; an output a choice, as XRANGE gives it.
-- From  queued -> claimed, epoch + 1; queued -> failed, if it is late.
-- A claim whose reply got lost leaves jobs that this owner has but does not name as held: they are given
-- again under their epoch, so a repeated call loses nothing.
local owner, lease_ms, held_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
local tenants = ARGV[3] ~= '' and cjson.decode(ARGV[3]) or {}
local NO_LIMITS = { 1, 0, 0 }
local SKIPS_PER_CALL = 1000 -- bounds the server's time; twice as many as come back in a call
local RETURNS_PER_CALL = 500
local GARBAGE_PER_CALL = 100
local now_ms = clock()
local lease_end = int(now_ms + lease_ms)
local given, skips, rubbish = {}, 0, 0

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

-- Whether a member of a queue is a job waiting there; if not, it becomes evidence.
local function waiting(ref, class)
  local job = fields(ref, 'state', 'sla_class', 'epoch', 'arrival_us')
  local state = job and job[1]
  if state == 'queued' and job[2] == class and count(job[4]) and (not job[3] or count(job[3])) then
    return true
  end
  rubbish = rubbish + 1
  redis.call('ZREM', QUEUE .. class, ref)
  if LIVE[state] or FINAL[state] or (state == 'queued' and job[2] and job[2] ~= class) then
    garbage(ref, 'queue ' .. class .. ' named a job that does not wait in it; the entry was removed', now_ms)
  else
    garbage(ref, 'queue ' .. class .. ' held something that is no job; removed', now_ms)
    remove(ref)
  end
  return false
end

-- Looks at the oldest entry of a class: what is no job goes, and a job that lost its place in its line gets it again.
local function heal(class)
  while rubbish < GARBAGE_PER_CALL do
    local ref = redis.call('ZRANGE', QUEUE .. class, 0, 0)[1]
    if not ref then
      return false
    elseif waiting(ref, class) then
      local place_now = place(ref, redis.call('HGET', JOB .. ref, 'arrival_us'))
      if not ask('ZSCORE', line_of(ref, class), place_now) then
        enter(ref)
        return true
      end
      return false
    end
  end
  return false
end

-- The tenant to be served, its counter and its limits; nil if nobody can be. Who is at a quota loses the turn.
local function choose(class)
  while skips < SKIPS_PER_CALL do
    local turn = redis.call('ZRANGE', TURN .. class, 0, 0, 'WITHSCORES')
    local tenant = turn[1]
    if not tenant then
      return nil
    end
    local limits = tenants[tenant] or NO_LIMITS
    local rest_ms = rest_until(tenant, limits[2], limits[3], now_ms)
    if not rest_ms then
      return tenant, tonumber(turn[2]), limits
    end
    redis.call('ZREM', TURN .. class, tenant)
    redis.call('ZADD', RESTING .. class, int(rest_ms), tenant)
    skips = skips + 1
  end
end

-- The job a tenant gets served; nil if what stood first was none.
local function first_of(class, tenant)
  local line = LINE .. class .. '/' .. tenant
  local member = (ask('ZRANGE', line, 0, 0) or {})[1]
  if not member then
    redis.call('DEL', line)
    redis.call('ZREM', TURN .. class, tenant)
    garbage(tenant, 'a turn in class ' .. class .. ' had no waiting job behind it; removed', now_ms)
    rubbish = rubbish + 1
    return nil
  end
  local ref = member:sub(18)
  if not waiting(ref, class) or place(ref, redis.call('HGET', JOB .. ref, 'arrival_us')) ~= member
    or tenant_of(ref) ~= tenant then
    redis.call('ZREM', line, member)
    rubbish = rubbish + 1
    if redis.call('EXISTS', line) == 0 then
      redis.call('ZREM', TURN .. class, tenant)
    end
    return nil
  end
  return ref
end

local function take(ref, class, tenant, limits)
  local job = redis.call('HMGET', JOB .. ref, 'queued_ms', 'waited_ms', 'epoch', 'arrival_us', 'prompt_tokens')
  local waited_ms = (count(job[2]) or 0) + math.max(0, now_ms - (count(job[1]) or now_ms))
  local epoch = count(job[3]) or 0
  if epoch == 0 then -- A job that comes back has paid for its prompt.
    local tokens = math.max(1, count(job[5]) or 1)
    charge(class, tenant, cost_of(tokens, limits[1]))
    if limits[3] > 0 then
      meter(tenant, tokens, now_ms)
    end
  end
  leave(ref, class, job[4])
  redis.call('HSET', JOB .. ref, 'state', 'claimed', 'owner', owner, 'epoch', int(epoch + 1),
    'claimed_ms', int(now_ms), 'waited_ms', int(waited_ms), 'weight', digits(limits[1]),
    'metered', limits[3] > 0 and '1' or '0')
  redis.call('SADD', OWNER .. owner, ref)
  put('SADD', HOLDS .. tenant, ref)
  redis.call('HINCRBY', TOTALS, 'claimed', 1)
  give(ref)
end

local function claim(class, room)
  mend({ { QUEUE .. class, 'zset' }, { TURN .. class, 'zset' }, { RESTING .. class, 'zset' } }, now_ms)
  local rested = redis.call('ZRANGEBYSCORE', RESTING .. class, '-inf', int(now_ms), 'LIMIT', 0, RETURNS_PER_CALL)
  for _, tenant in ipairs(rested) do
    redis.call('ZREM', RESTING .. class, tenant)
    give_turn(class, tenant)
  end
  heal(class)
  while room > 0 and rubbish < GARBAGE_PER_CALL do
    local tenant, counter, limits = choose(class)
    if not tenant then
      if skips >= SKIPS_PER_CALL or not heal(class) then
        return
      end
    else
      local ref = first_of(class, tenant)
      if ref then
        local due = due_of(unpack(redis.call('HMGET', JOB .. ref, 'deadline_ms', 'start_by_ms', 'started_ms')))
        if due and due <= now_ms then
          conclude_late(ref, due, now_ms)
        else
          raise_floor(class, counter)
          take(ref, class, tenant, limits)
          room = room - 1
        end
      end
    end
  end
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
for i = 5 + held_count, #ARGV, 2 do
  claim(ARGV[i], tonumber(ARGV[i + 1]))
end
return { int(now_ms), given }
