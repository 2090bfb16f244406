-- How fast the jobs of a class are served, for estimates. Stands after line.lua in every script.
--
-- A claim that takes jobs counts them, and the time for which the oldest of them had to wait for it: since the claim
-- before, or since it came. Time over jobs is the class's pace, whatever stood in the way meanwhile: more urgent
-- classes, other daemons, long jobs. Where rows were idle a job is claimed at once, which says nothing of how fast rows
-- come free: that is left out. Claims count less the older they are. From the claim to the first row it takes
-- the class's lag. Nothing grows: one small hash a class, which goes when nothing was claimed for a while.

local PACE_TTL_MS = 600000
local KEPT = 0.9 -- weight of what was, at each claim: about the last ten claims count
local IDLE_MS = 100 -- who waited for less found an idle row, unless others were left waiting
local LEAST_CLAIMED = 3 -- below, nothing is known

-- A number that we wrote, else 0: fields may have been written by hand.
local function amount(value)
  local number = tonumber(value or nil)
  return number and number >= 0 and number < 2 ^ 53 and number or 0
end

local function pace_of(class)
  local found = ask('HMGET', PACE .. class, 'last_ms', 'left', 'claims', 'claims_ms', 'starts', 'starts_ms') or {}
  return {
    last_ms = amount(found[1]), left = found[2] == '1', claims = amount(found[3]), claims_ms = amount(found[4]),
    starts = amount(found[5]), starts_ms = amount(found[6]),
  }
end

-- Jobs of a class were claimed, of which the oldest has waited since a time.
local function note_claims(class, taken, oldest_ms, now_ms)
  local pace = pace_of(class)
  local waited_ms = math.max(0, now_ms - math.max(pace.last_ms, oldest_ms))
  if pace.last_ms > 0 and (pace.left or waited_ms >= IDLE_MS) then
    pace.claims = pace.claims * KEPT + taken
    pace.claims_ms = pace.claims_ms * KEPT + waited_ms
  end
  put('HSET', PACE .. class, 'last_ms', int(now_ms), 'left', int(redis.call('EXISTS', TURN .. class)),
    'claims', digits(pace.claims), 'claims_ms', digits(pace.claims_ms))
  redis.call('PEXPIRE', PACE .. class, PACE_TTL_MS)
end

-- A job of a class got its first row, some time after its claim.
local function note_start(class, lag_ms)
  local pace = pace_of(class)
  put('HSET', PACE .. class, 'starts', digits(pace.starts * KEPT + 1),
    'starts_ms', digits(pace.starts_ms * KEPT + math.max(0, lag_ms)))
  redis.call('PEXPIRE', PACE .. class, PACE_TTL_MS)
end

-- Time from one claim of a class to the next, ms; nil if too little is known. While nobody is claimed it grows.
local function pace_ms(class, now_ms)
  local pace = pace_of(class)
  if pace.claims < LEAST_CLAIMED then
    return nil
  end
  local oldest = (ask('ZRANGE', QUEUE .. class, 0, 0) or {})[1]
  local job = oldest and fields(oldest, 'queued_ms')
  local since_ms = math.max(pace.last_ms, job and count(job[1]) or now_ms)
  local open_ms = math.max(0, now_ms - since_ms)
  return math.max(pace.claims_ms / pace.claims, (pace.claims_ms + open_ms) / (pace.claims + 1))
end

-- Time from a claim to the first row, ms; nil if nothing is known.
local function lag_ms(class)
  local pace = pace_of(class)
  return pace.starts > 0 and pace.starts_ms / pace.starts or nil
end
