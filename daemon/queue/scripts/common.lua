-- Shared by all scripts: stands between the rendered key names (keys.py) and each script's own text.
--
-- States and moves; whatever is not here can't happen:
--   queued                  -> claimed | cancelled | dead
--   claimed running parked  -> running | parked | queued (given up) | succeeded | cancelled | failed | dead
--   succeeded cancelled failed -> nothing, they are final
--   dead                    -> queued, by an operator's dead_retry only
-- Each script runs alone in the server, so a check and the change after it are one compare-and-set.
-- Time is the server's (TIME); a daemon's clock plays no part.

local LIVE = { claimed = true, running = true, parked = true }
local FINAL = { succeeded = true, cancelled = true, failed = true, dead = true }
local DEFAULT_TTL_MS = 3600000 -- for records that lost theirs
local HISTORY_BYTES = 4096
local GARBAGE_KEPT = 1000 -- dead letters; older ones go first
local MOST_CHOICES = 128 -- as in params.py; records may have been written by hand

-- Lua prints large numbers as 1.7e+15; Redis must get all digits.
local function int(number)
  return string.format('%.0f', number)
end

-- A whole number as we write them, else nil: fields may have been written by hand.
local function count(value)
  return value and value:match('^%d+$') and #value < 17 and tonumber(value) or nil
end

-- now_ms, now_us as numbers
local function clock()
  local time = redis.call('TIME')
  local us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  return math.floor(us / 1000), us
end

-- Fields of a job (false where missing); nil if its key holds another type.
local function fields(ref, ...)
  local values = redis.pcall('HMGET', JOB .. ref, ...)
  if values.err then
    return nil
  end
  return values
end

local function clean(raw)
  return (raw:gsub('[^\n\32-\126]', function(char)
    return string.format('\\x%02x', char:byte())
  end))
end

local function letter(name, reason, message, now_ms, history)
  redis.call('ZADD', DEAD, int(now_ms), name)
  redis.call('HSET', EVIDENCE, name, cjson.encode({
    reason = reason, message = clean(message), died_ms = now_ms, history = clean(history or ''),
  }))
  for _, old in ipairs(redis.call('ZRANGE', DEAD, 0, -GARBAGE_KEPT - 1)) do
    if old:sub(1, 8) == 'garbage:' then
      redis.call('ZREM', DEAD, old)
      redis.call('HDEL', EVIDENCE, old)
    end
  end
end

-- Evidence of something that is no job; the thing itself is removed by the caller.
local function garbage(raw, message, now_ms)
  redis.call('HINCRBY', TOTALS, 'garbage', 1)
  letter('garbage:' .. clean(raw:sub(1, 200)), 'GARBAGE', message, now_ms)
end

-- Removes keys of another type than they should have: somebody pushed into them by hand.
-- Takes {key, type} pairs. All are removed before any becomes evidence: they may be where evidence goes.
local function mend(pairs_of, now_ms)
  local wrong = {}
  for _, pair in ipairs(pairs_of) do
    local found = redis.call('TYPE', pair[1]).ok
    if found ~= 'none' and found ~= pair[2] then
      redis.call('DEL', pair[1])
      wrong[#wrong + 1] = { pair[1], 'a ' .. found .. ' lay where a ' .. pair[2] .. ' belongs; removed' }
    end
  end
  for _, one in ipairs(wrong) do
    garbage(one[1], one[2], now_ms)
  end
end

-- Key of a choice's output.
local function output(ref, choice)
  return OUT .. ref .. (choice > 0 and '#' .. int(choice) or '')
end

-- Keys of all that a job has; `choices` where more than its record says may be left over.
local function all_keys(ref, choices)
  local job = fields(ref, 'choices')
  local keys = { JOB .. ref, SPEC .. ref }
  for choice = 0, math.min(math.max(job and count(job[1]) or 1, choices or 1), MOST_CHOICES) - 1 do
    keys[#keys + 1] = output(ref, choice)
  end
  return keys
end

local function remove(ref, choices)
  redis.call('DEL', unpack(all_keys(ref, choices)))
  redis.call('ZREM', EXPIRING, ref)
  redis.call('ZREM', LEASES, ref)
  local tenant = ref:match('^([^/]+)/')
  if tenant then
    redis.call('ZREM', TENANT .. tenant, ref)
  end
end

local function end_claim(ref, owner)
  redis.call('ZREM', LEASES, ref)
  if owner and owner ~= '' then
    redis.call('SREM', OWNER .. owner, ref)
  end
end

-- Puts a job that is not final into a final state. Everything of it gets its time to live here.
local function conclude(ref, state, now_ms)
  local job = redis.call('HMGET', JOB .. ref, 'state', 'sla_class', 'owner', 'ttl_ms')
  if job[1] == 'queued' and job[2] then
    redis.call('ZREM', QUEUE .. job[2], ref)
  end
  end_claim(ref, job[3])
  redis.call('HSET', JOB .. ref, 'state', state, 'owner', '', 'finished_ms', int(now_ms))
  redis.call('HINCRBY', TOTALS, state, 1)
  if state ~= 'dead' then
    local ttl_ms = math.max(1, count(job[4]) or DEFAULT_TTL_MS)
    redis.call('HSET', JOB .. ref, 'expires_ms', int(now_ms + ttl_ms))
    for _, key in ipairs(all_keys(ref)) do
      redis.call('PEXPIRE', key, int(ttl_ms))
    end
    redis.call('ZADD', EXPIRING, int(now_ms + ttl_ms), ref)
  end
  redis.call('PUBLISH', NEWS .. ref, state)
end

local function conclude_dead(ref, reason, message, now_ms)
  local history = redis.call('HGET', JOB .. ref, 'history')
  redis.call('HSET', JOB .. ref, 'error_reason', reason, 'error_message', message)
  conclude(ref, 'dead', now_ms)
  letter(ref, reason, message, now_ms, history or '')
end

-- Gives up the claim of a live job: back to its place in the queue with its tokens, unless a cancel waits
-- for it or its attempts are used up. Gives the state it came to.
local function requeue(ref, charge, why, max_attempts, now_ms)
  local job = redis.call('HMGET', JOB .. ref,
    'owner', 'sla_class', 'arrival_us', 'attempts', 'cancel_requested', 'epoch', 'history')
  local attempts = count(job[4]) or 0
  if charge then
    attempts = attempts + 1
    local line = int(now_ms) .. ' epoch ' .. (job[6] or '?') .. ' owner ' .. (job[1] or '?') .. ': ' .. why .. '\n'
    redis.call('HSET', JOB .. ref, 'attempts', attempts,
      'history', ((job[7] or '') .. line):sub(-HISTORY_BYTES))
  end
  if job[5] == '1' then
    redis.call('HSET', JOB .. ref, 'finish_reason', 'cancelled')
    conclude(ref, 'cancelled', now_ms)
    return 'cancelled'
  end
  if charge and attempts >= max_attempts then
    conclude_dead(ref, 'ATTEMPTS', 'given up after ' .. attempts .. ' attempts; the last: ' .. why, now_ms)
    return 'dead'
  end
  if not job[2] or not count(job[3]) then
    conclude_dead(ref, 'BAD_RECORD', 'the record has no class or no arrival', now_ms)
    return 'dead'
  end
  end_claim(ref, job[1])
  redis.call('HSET', JOB .. ref, 'state', 'queued', 'owner', '', 'queued_ms', int(now_ms))
  redis.call('ZADD', QUEUE .. job[2], job[3], ref)
  redis.call('PUBLISH', WAKE, job[2])
  redis.call('PUBLISH', NEWS .. ref, 'queued')
  return 'queued'
end

-- nil if this owner may write to the job under this epoch, else why not.
local function barred(job_state, job_owner, job_epoch, owner, epoch)
  if not job_state then
    return 'missing'
  elseif FINAL[job_state] then
    return 'final'
  elseif not LIVE[job_state] or job_owner ~= owner or job_epoch ~= epoch then
    return 'fenced'
  end
  return nil
end
