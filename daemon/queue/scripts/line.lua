-- Who is next. Stands after common.lua in every script.
--
-- Waiting jobs of one class and tenant stand in a line; a tenant with a line has a turn in the class. A claim takes
-- the class, the tenant whose turn has the smallest score, and the first of its line: O(log n), whatever else waits.
-- The score is the tenant's counter in the class: tokens / weight, prompts charged at the first claim, output when it
-- is committed (virtual token counter: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, 4.1).
-- The class's floor is the counter of the tenant served last. Whoever comes to an empty line goes on from the floor
-- at least: time spent idle gives no credit. So a counter at or below the floor says nothing and is dropped. One above
-- it (debt) is dropped when the floor comes there, when the queue is empty, and when too many others have more:
-- nothing is kept of tenants that are gone.

local ACCOUNTS_TTL_MS = 3600000 -- of a class, without a charge: for queues without a daemon
local MOST_ACCOUNTS = 10000
local QUEUE_STEP = 2 ^ -9 -- of a token: who comes at the floor stands behind those who came there before
local LOOK_AGAIN_MS = 5000 -- at a tenant with too many running jobs; the end of one is looked at at once
local RETRY_MS = 1000
local MINUTE_MS = 60000
local HIGHEST_COUNTER = 2 ^ 43 -- above it small charges would be rounded away; all counters of the class go down

-- A score with all its digits.
local function digits(number)
  return string.format('%.17g', number)
end

-- Reads a key; nil if something else lies there.
local function ask(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    return nil
  end
  return reply
end

-- Writes to a key; if something else lies there, put there by hand, it goes.
local function put(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    if reply.err:find('WRONGTYPE', 1, true) or reply.err:find('not an integer', 1, true) then
      redis.call('DEL', key)
    end
    return redis.call(command, key, ...)
  end
  return reply
end

local function tenant_of(ref)
  return ref:match('^([^/]+)/') or ''
end

local function line_of(ref, class)
  return LINE .. class .. '/' .. tenant_of(ref)
end

-- Members of a line with equal due time stand in order of arrival.
local function place(ref, arrival_us)
  return string.format('%016.0f ', tonumber(arrival_us)) .. ref
end

-- A counter as we count, else nil: no number, none that can grow, or endless, written by hand.
local function sound(counter)
  return counter and counter >= 0 and counter <= 2 * HIGHEST_COUNTER and counter or nil
end

-- The counter from which a tenant new in the class begins.
local function floor_of(class)
  local floor = tonumber(ask('GET', FLOOR .. class) or nil)
  return sound(floor) or sound(tonumber((ask('ZRANGE', TURN .. class, 0, 0, 'WITHSCORES') or {})[2])) or 0
end

local function counter_of(class, tenant, floor)
  return math.max(floor or floor_of(class), sound(tonumber(ask('ZSCORE', ACCOUNTS .. class, tenant) or nil)) or 0)
end

-- Lowers all counters of a class, so that they can't grow for ever.
local function lower(class, by)
  for _, key in ipairs({ ACCOUNTS .. class, TURN .. class }) do
    local counters = ask('ZRANGE', key, 0, -1, 'WITHSCORES') or {}
    for i = 1, #counters, 2 do
      redis.call('ZADD', key, digits(math.max(0, tonumber(counters[i + 1]) - by)), counters[i])
    end
  end
end

local function set_floor(class, floor)
  redis.call('SET', FLOOR .. class, digits(floor), 'PX', int(2 * ACCOUNTS_TTL_MS)) -- it outlives the accounts
end

-- A tenant of the class was chosen at this counter: nobody who comes later starts below it.
local function raise_floor(class, chosen)
  local floor = math.max(floor_of(class), chosen)
  if floor > HIGHEST_COUNTER then
    lower(class, floor)
    floor = 0
  end
  set_floor(class, floor)
  put('ZREMRANGEBYSCORE', ACCOUNTS .. class, '-inf', digits(floor))
  redis.call('ZREMRANGEBYRANK', ACCOUNTS .. class, 0, -MOST_ACCOUNTS - 1)
  redis.call('PEXPIRE', ACCOUNTS .. class, ACCOUNTS_TTL_MS)
end

local function set_counter(class, tenant, counter, has_turn)
  put('ZADD', ACCOUNTS .. class, digits(counter), tenant)
  if has_turn then
    redis.call('ZADD', TURN .. class, 'XX', digits(counter), tenant)
  end
end

-- Charges tokens; `cost` is tokens / weight.
local function charge(class, tenant, cost)
  local turn = tonumber(ask('ZSCORE', TURN .. class, tenant) or nil)
  set_counter(class, tenant, (sound(turn) or counter_of(class, tenant)) + cost, turn)
  redis.call('PEXPIRE', ACCOUNTS .. class, ACCOUNTS_TTL_MS)
end

-- Counts tokens against the minute of a tenant that has a quota on them.
local function meter(tenant, tokens, now_ms)
  local minute = MINUTE .. tenant .. '/' .. int(math.floor(now_ms / MINUTE_MS))
  put('INCRBY', minute, int(tokens))
  redis.call('PEXPIRE', minute, 2 * MINUTE_MS)
end

-- Forgets the counters of a class in which nobody waits, once nothing runs: whoever comes then begins level.
local function forget_counters()
  if redis.call('EXISTS', LEASES) == 0 then
    for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
      if redis.call('EXISTS', QUEUE .. class) == 0 then
        redis.call('DEL', ACCOUNTS .. class, FLOOR .. class)
      end
    end
  end
end

-- Cost of tokens at a weight read from a record.
local function cost_of(tokens, weight)
  weight = tonumber(weight or nil) or 1
  return tokens / math.min(math.max(weight, 1e-3), 1e3)
end

local function give_turn(class, tenant)
  local floor = floor_of(class)
  local counter = counter_of(class, tenant, floor)
  if put('ZADD', TURN .. class, 'NX', digits(counter), tenant) == 1 and counter <= floor then
    set_floor(class, floor + QUEUE_STEP)
  end
end

-- When a job is late, in ms: by its deadline, or by its longest queue time while it has had no row. Else nil.
local function due_of(deadline_ms, start_by_ms, started_ms)
  local deadline, start_by = count(deadline_ms) or 0, count(start_by_ms) or 0
  if start_by > 0 and not started_ms and (deadline == 0 or start_by < deadline) then
    return start_by
  end
  return deadline > 0 and deadline or nil
end

-- Puts a waiting job into its place, which stays the same over hand-backs: earliest due time, then arrival.
-- `job`: sla_class, arrival_us, deadline_ms, start_by_ms and started_ms, where the caller has just written them.
local function enter(ref, job)
  job = job
    or redis.call('HMGET', JOB .. ref, 'sla_class', 'arrival_us', 'deadline_ms', 'start_by_ms', 'started_ms')
  local class, tenant = job[1], tenant_of(ref)
  put('ZADD', QUEUE .. class, job[2], ref)
  put('ZADD', line_of(ref, class), int(due_of(job[3], job[4]) or 2 ^ 53), place(ref, job[2]))
  local due = due_of(job[3], job[4], job[5])
  if due then
    put('ZADD', DUE, int(due), ref)
  end
  if not ask('ZSCORE', RESTING .. class, tenant) then
    give_turn(class, tenant)
  end
end

-- Takes a job out of its line; gives whether its tenant has others in it. `never_due`: it is not among the due ones.
-- `more`: its tenant is known to have others.
local function leave(ref, class, arrival_us, never_due, more)
  redis.call('ZREM', QUEUE .. class, ref)
  if not never_due then
    ask('ZREM', DUE, ref)
  end
  if count(arrival_us) then
    ask('ZREM', line_of(ref, class), place(ref, arrival_us))
  end
  if more or redis.call('EXISTS', line_of(ref, class)) == 1 then
    return true
  end
  ask('ZREM', TURN .. class, tenant_of(ref))
  ask('ZREM', RESTING .. class, tenant_of(ref))
  return false
end

local function waiting_of(tenant)
  local waiting = 0
  for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
    waiting = waiting + (ask('ZCARD', LINE .. class .. '/' .. tenant) or 0)
  end
  return waiting
end

-- When a tenant that has used up its minute may go on, in ms; nil if it has not. The minute slides: what was used
-- in the calendar minute before counts by the part of it that lies in the last 60 s.
local function minute_over(tenant, most, now_ms)
  local minute = math.floor(now_ms / MINUTE_MS)
  local now = count(ask('GET', MINUTE .. tenant .. '/' .. int(minute)) or nil) or 0
  local before = count(ask('GET', MINUTE .. tenant .. '/' .. int(minute - 1)) or nil) or 0
  if now + before * (1 - now_ms % MINUTE_MS / MINUTE_MS) < most then
    return nil
  elseif now < most then
    return minute * MINUTE_MS + math.floor(MINUTE_MS * (1 - (most - now) / before)) + 1
  end
  return (minute + 1) * MINUTE_MS + math.floor(MINUTE_MS * (1 - most / now)) + 1
end

-- When to look again at a tenant that gets nothing more now, in ms, and at which quota it is; nil if it may be given a
-- job.
local function rest_until(tenant, running, tokens_per_minute, now_ms)
  if running > 0 and (ask('SCARD', HOLDS .. tenant) or 0) >= running then
    return now_ms + LOOK_AGAIN_MS, 'max_running'
  elseif tokens_per_minute > 0 then
    return minute_over(tenant, tokens_per_minute, now_ms), 'tokens_per_minute'
  end
  return nil
end

-- Lets a tenant whose running job ended compete again, where it had been skipped.
local function wake_tenant(tenant)
  for _, class in ipairs(redis.call('SMEMBERS', CLASSES)) do
    if (ask('ZREM', RESTING .. class, tenant) or 0) == 1 then
      give_turn(class, tenant)
      redis.call('PUBLISH', WAKE, class)
    end
  end
end
