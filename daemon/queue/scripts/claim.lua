-- Gives waiting jobs to a daemon: most urgent class first, there the tenant with the smallest counter, there the job
-- due first, then the oldest (line.lua). Tenants at a quota are skipped.
-- KEYS  base
-- ARGV  owner, lease_ms, JSON {tenant: [weight, running, tokens per minute]} or '', held refs with a blank between,
--       then pairs of class and limit in order of urgency
-- Gives {now_ms, list of {ref, record, spec, outputs}, list of {tenant, quota}, list of refs}: an output a choice, as
-- XRANGE gives it, the tenants whose turn was taken away, and the jobs that failed because they were late.
-- From  queued -> claimed, epoch + 1; queued -> failed, if it is late.
-- A claim whose reply got lost leaves jobs that this owner has but does not name as held: they are given
-- again under their epoch, so a repeated call loses nothing.
local owner, lease_ms = ARGV[1], tonumber(ARGV[2])
local tenants = ARGV[3] ~= '' and cjson.decode(ARGV[3]) or {}
local NO_LIMITS = { 1, 0, 0 }
local SKIPS_PER_CALL = 1000 -- bounds the server's time; twice as many as come back in a call
local RETURNS_PER_CALL = 500
local GARBAGE_PER_CALL = 100
local now_ms = clock()
local lease_end = int(now_ms + lease_ms)
local given, rests, late, skips, rubbish = {}, {}, {}, 0, 0

local function give(ref, choices)
  redis.call('ZADD', LEASES, lease_end, ref)
  local outputs = {}
  for choice = 0, math.min(choices or 1, MOST_CHOICES) - 1 do
    local entries = redis.pcall('XRANGE', output(ref, choice), '-', '+')
    outputs[#outputs + 1] = entries.err and {} or entries
  end
  local spec = redis.pcall('GET', SPEC .. ref)
  given[#given + 1] = { ref, redis.call('HGETALL', JOB .. ref), spec and not spec.err and spec or false, outputs }
end

-- What a claim has to know of a job that a queue names; nil if it does not wait there: then it becomes evidence.
local function look_at(ref, class)
  local job = fields(ref, 'state', 'sla_class', 'epoch', 'arrival_us', 'deadline_ms', 'start_by_ms', 'started_ms',
    'queued_ms', 'waited_ms', 'prompt_tokens', 'choices', 'updated')
  local state = job and job[1]
  if state == 'queued' and job[2] == class and count(job[4]) and (not job[3] or count(job[3])) then
    return {
      place = place(ref, job[4]), arrival_us = job[4], epoch = count(job[3]) or 0,
      due = due_of(job[5], job[6], job[7]),
      waited_ms = (count(job[9]) or 0) + math.max(0, now_ms - (count(job[8]) or now_ms)),
      queued_ms = count(job[8]) or now_ms, prompt_tokens = math.max(1, count(job[10]) or 1), choices = count(job[11]) or 1,
      updated = job[12],
    }
  end
  rubbish = rubbish + 1
  redis.call('ZREM', QUEUE .. class, ref)
  if LIVE[state] or FINAL[state] or (state == 'queued' and job[2] and job[2] ~= class) then
    garbage(ref, 'queue ' .. class .. ' named a job that does not wait in it; the entry was removed', now_ms)
  else
    garbage(ref, 'queue ' .. class .. ' held something that is no job; removed', now_ms)
    remove(ref)
  end
end

-- Whether a tenant with a line has neither a turn nor a rest: a hand took it.
local function forgotten(class, tenant)
  return not ask('ZSCORE', TURN .. class, tenant) and not ask('ZSCORE', RESTING .. class, tenant)
end

-- Looks at the oldest entry of a class: what is no job goes, and a job that lost its place in its line gets it again.
-- Where nobody has a turn, the tenant of the oldest gets one.
local function heal(class, nobody)
  while rubbish < GARBAGE_PER_CALL do
    local ref = redis.call('ZRANGE', QUEUE .. class, 0, 0)[1]
    local job = ref and look_at(ref, class)
    if job and not ask('ZSCORE', line_of(ref, class), job.place) then
      enter(ref)
      return true
    elseif job and nobody and forgotten(class, tenant_of(ref)) then
      give_turn(class, tenant_of(ref))
      return true
    elseif job or not ref then
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
    local rest_ms, quota = rest_until(tenant, limits[2], limits[3], now_ms)
    if not rest_ms then
      return tenant, sound(tonumber(turn[2])) or counter_of(class, tenant), limits
    end
    redis.call('ZREM', TURN .. class, tenant)
    redis.call('ZADD', RESTING .. class, int(rest_ms), tenant)
    rests[#rests + 1] = { tenant, quota }
    skips = skips + 1
  end
end

-- The first of a tenant's line and what is known of it; nil if what stood there was no job.
local function first_of(class, tenant)
  local line = LINE .. class .. '/' .. tenant
  local members = ask('ZRANGE', line, 0, 1) or {}
  local member = members[1]
  if not member then
    redis.call('DEL', line)
    redis.call('ZREM', TURN .. class, tenant)
    garbage(tenant, 'a turn in class ' .. class .. ' had no waiting job behind it; removed', now_ms)
    rubbish = rubbish + 1
    return nil
  end
  local ref = member:sub(18)
  local job = look_at(ref, class)
  if job and job.place == member and tenant_of(ref) == tenant then
    job.more = members[2] ~= nil
    return ref, job
  end
  rubbish = rubbish + 1
  redis.call('ZREM', line, member)
  if redis.call('EXISTS', line) == 0 then
    redis.call('ZREM', TURN .. class, tenant)
  end
end

local function take(ref, job, class, tenant, counter, limits)
  local more = leave(ref, class, job.arrival_us, not job.due, job.more)
  if job.epoch == 0 then -- A job that comes back has paid for its prompt.
    set_counter(class, tenant, counter + cost_of(job.prompt_tokens, limits[1]), more)
    if limits[3] > 0 then
      meter(tenant, job.prompt_tokens, now_ms)
    end
  elseif not more then -- Its turn has gone, its debt has not.
    set_counter(class, tenant, counter, false)
  end
  if job.updated then
    redis.call('HDEL', JOB .. ref, 'updated') -- the claim tells the present state
  end
  redis.call('HSET', JOB .. ref, 'state', 'claimed', 'owner', owner, 'epoch', int(job.epoch + 1),
    'claimed_ms', int(now_ms), 'waited_ms', int(job.waited_ms), 'weight', digits(limits[1]),
    'metered', limits[3] > 0 and '1' or '0')
  redis.call('SADD', OWNER .. owner, ref)
  put('SADD', HOLDS .. tenant, ref)
  give(ref, job.choices)
end

-- Takes jobs of a class; gives how many, the highest counter served, and since when the oldest has waited.
local function fill(class, room)
  local taken, highest, oldest_ms = 0, 0, now_ms
  while taken < room and rubbish < GARBAGE_PER_CALL do
    local tenant, counter, limits = choose(class)
    if tenant then
      local ref, job = first_of(class, tenant)
      if ref and job.due and job.due <= now_ms then
        conclude_late(ref, job.due, now_ms)
        late[#late + 1] = ref
      elseif ref then
        take(ref, job, class, tenant, counter, limits)
        taken, highest = taken + 1, math.max(highest, counter)
        oldest_ms = math.min(oldest_ms, job.queued_ms)
      end
    elseif skips >= SKIPS_PER_CALL or not heal(class, true) then
      break
    end
  end
  return taken, highest, oldest_ms
end

local function claim(class, room)
  mend({ { QUEUE .. class, 'zset' }, { TURN .. class, 'zset' }, { RESTING .. class, 'zset' } }, now_ms)
  local rested = redis.call('ZRANGEBYSCORE', RESTING .. class, '-inf', int(now_ms), 'LIMIT', 0, RETURNS_PER_CALL)
  for _, tenant in ipairs(rested) do
    redis.call('ZREM', RESTING .. class, tenant)
    give_turn(class, tenant)
  end
  heal(class)
  local taken, highest, oldest_ms = fill(class, room)
  if taken > 0 then
    raise_floor(class, highest)
    note_claims(class, taken, oldest_ms, now_ms)
    redis.call('HINCRBY', TOTALS, 'claimed', taken)
  end
end

local held = {}
for ref in ARGV[4]:gmatch('%S+') do
  held[ref] = true
end
for _, ref in ipairs(redis.call('SMEMBERS', OWNER .. owner)) do
  if not held[ref] then
    local job = fields(ref, 'state', 'owner', 'choices')
    if job and LIVE[job[1]] and job[2] == owner then
      give(ref, count(job[3]))
    else
      redis.call('SREM', OWNER .. owner, ref)
    end
  end
end
for i = 5, #ARGV, 2 do
  claim(ARGV[i], tonumber(ARGV[i + 1]))
end
return { int(now_ms), given, rests, late }
