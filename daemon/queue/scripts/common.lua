-- Shared by all scripts: stands between the rendered key names (keys.py) and line, pace, moves and each script's text.
-- Each script runs alone in the server, so a check and the change after it are one compare-and-set.
-- Time is the server's (TIME); a daemon's clock plays no part.

local LIVE = { claimed = true, running = true, parked = true }
local FINAL = { succeeded = true, cancelled = true, failed = true, dead = true }
local GARBAGE_KEPT = 1000 -- dead letters; older ones go first
local GARBAGE_SEEN = 16 -- so many beyond those are looked at; each letter pushes one there
local MOST_CHOICES = 128 -- as in params.py; records may have been written by hand

-- Every command of the scripts goes through here. Where something of another type lies, or no number, a hand has put
-- it there: it goes, with evidence, and the command is done. A script that broke off would leave half its work.
local server, garbage, clock = redis, nil, nil
local redis = { pcall = server.pcall }
function redis.call(command, key, ...)
  local reply = server.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then
    return reply
  elseif reply.err:find('WRONGTYPE', 1, true) then
    local found = server.call('TYPE', key).ok
    server.call('DEL', key)
    garbage(key, 'a ' .. found .. ' lay where something of another type belongs; removed', (clock()))
  elseif command == 'HINCRBY' and (reply.err:find('not an integer', 1, true) or reply.err:find('overflow', 1, true)) then
    server.call('HDEL', key, (...))
  end
  return server.call(command, key, ...)
end

-- Lua prints large numbers as 1.7e+15; Redis must get all digits.
local function int(number)
  return string.format('%.0f', number)
end

-- A whole number as we write them, else nil: fields may have been written by hand.
local function count(value)
  return value and value:match('^%d+$') and #value < 17 and tonumber(value) or nil
end

-- now_ms, now_us as numbers
function clock()
  local time = server.call('TIME')
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
  for _, old in ipairs(redis.call('ZRANGE', DEAD, -GARBAGE_KEPT - GARBAGE_SEEN, -GARBAGE_KEPT - 1)) do
    if old:sub(1, 8) == 'garbage:' then
      redis.call('ZREM', DEAD, old)
      redis.call('HDEL', EVIDENCE, old)
    end
  end
end

-- Evidence of something that is no job; the thing itself is removed by the caller.
function garbage(raw, message, now_ms)
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
