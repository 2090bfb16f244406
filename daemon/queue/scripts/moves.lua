-- How jobs move. Stands after pace.lua in every script.
--
-- States and moves; whatever is not here can't happen:
--   queued                  -> claimed | cancelled | failed (too late) | dead
--   claimed running parked  -> running | parked | queued (given up) | succeeded | cancelled | failed | dead
--   succeeded cancelled failed -> nothing, they are final
--   dead                    -> queued, by an operator's dead_retry only

local DEFAULT_TTL_MS = 3600000 -- for records that lost theirs
local HISTORY_BYTES = 4096

-- Adds a line to a job's history: a claim that ended badly.
local function note(ref, history, epoch, owner, why, now_ms)
  local line = int(now_ms) .. ' epoch ' .. (epoch or '?') .. ' owner ' .. (owner or '?') .. ': ' .. why .. '\n'
  redis.call('HSET', JOB .. ref, 'history', ((history or '') .. line):sub(-HISTORY_BYTES))
end

-- Counts a claim that was given back in order: tenants are not shown it as an attempt.
local function note_return(ref, returns)
  redis.call('HSET', JOB .. ref, 'handed_back', int((count(returns) or 0) + 1))
end

local function end_claim(ref, owner)
  redis.call('ZREM', LEASES, ref)
  if owner and owner ~= '' then
    redis.call('SREM', OWNER .. owner, ref)
  end
  local tenant = tenant_of(ref)
  if (ask('SREM', HOLDS .. tenant, ref) or 0) == 1 then
    wake_tenant(tenant)
  end
end

local function remove(ref, choices)
  redis.call('DEL', unpack(all_keys(ref, choices)))
  redis.call('ZREM', EXPIRING, ref)
  end_claim(ref)
  local tenant = tenant_of(ref)
  if tenant ~= '' then
    redis.call('ZREM', TENANT .. tenant, ref)
  end
end

-- Puts a job that is not final into a final state. Everything of it gets its time to live here.
local function conclude(ref, state, now_ms)
  local job = redis.call('HMGET', JOB .. ref,
    'state', 'sla_class', 'owner', 'ttl_ms', 'arrival_us', 'queued_ms', 'waited_ms')
  if job[1] == 'queued' and job[2] then
    leave(ref, job[2], job[5])
    local stay_ms = math.max(0, now_ms - (count(job[6]) or now_ms))
    redis.call('HSET', JOB .. ref, 'waited_ms', int((count(job[7]) or 0) + stay_ms))
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

-- `for_tenant` where the message has what only operators may read.
local function conclude_dead(ref, reason, message, now_ms, for_tenant)
  local history = redis.call('HGET', JOB .. ref, 'history')
  redis.call('HSET', JOB .. ref, 'error_reason', reason, 'error_message', for_tenant or message)
  conclude(ref, 'dead', now_ms)
  letter(ref, reason, message, now_ms, history or '')
end

-- Fails a waiting job that is past its deadline or its longest queue time; its record says how long it waited.
local function conclude_late(ref, due_ms, now_ms)
  conclude(ref, 'failed', now_ms)
  local job = redis.call('HMGET', JOB .. ref, 'waited_ms', 'deadline_ms')
  local what = count(job[2]) == due_ms and 'deadline' or 'longest queue time'
  redis.call('HSET', JOB .. ref, 'error_reason', 'DEADLINE_EXCEEDED',
    'error_message', 'its ' .. what .. ' is over; it waited ' .. job[1] .. ' ms in the queue')
  redis.call('HINCRBY', TOTALS, 'late', 1)
end

-- Gives up the claim of a live job: back to its place in the queue with its tokens, unless a cancel waits
-- for it or its attempts are used up. Gives the state it came to.
local function requeue(ref, charge, why, max_attempts, now_ms)
  local job = redis.call('HMGET', JOB .. ref,
    'owner', 'sla_class', 'arrival_us', 'attempts', 'cancel_requested', 'epoch', 'history')
  local attempts = count(job[4]) or 0
  if charge then
    attempts = attempts + 1
    redis.call('HSET', JOB .. ref, 'attempts', attempts)
    note(ref, job[7], job[6], job[1], why, now_ms)
  end
  if job[5] == '1' then
    redis.call('HSET', JOB .. ref, 'finish_reason', 'cancelled')
    conclude(ref, 'cancelled', now_ms)
    return 'cancelled'
  end
  if charge and attempts >= max_attempts then
    local given_up = 'given up after ' .. attempts .. ' attempts'
    conclude_dead(ref, 'ATTEMPTS', given_up .. '; the last: ' .. why, now_ms,
      given_up .. ': each time its engine died while it ran alone')
    return 'dead'
  end
  if not job[2] or not count(job[3]) then
    conclude_dead(ref, 'BAD_RECORD', 'the record has no class or no arrival', now_ms)
    return 'dead'
  end
  end_claim(ref, job[1])
  redis.call('HSET', JOB .. ref, 'state', 'queued', 'owner', '', 'queued_ms', int(now_ms))
  enter(ref)
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
