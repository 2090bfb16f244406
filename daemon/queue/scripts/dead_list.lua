-- Reads a page of the dead-letter list, newest first; of one time of death, by name backwards. Changes nothing.
-- KEYS  base
-- ARGV  score and name of the last entry of the page before ('' begins), limit
-- Gives {{{name, score, evidence or false, {record ...}, 1 if its spec is there, else 0} ...}, 1 if there are more, else 0}.
local score, after, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])

-- By bytes, as sorted sets have it: `<` goes by the server's locale.
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    if a:byte(i) ~= b:byte(i) then
      return a:byte(i) < b:byte(i)
    end
  end
  return #a < #b
end

-- Place of the first entry of the page. The entry that ended the page before may be gone: nothing is skipped or
-- given twice for that.
local from = 0
if score ~= '' then
  from = ask('ZCOUNT', DEAD, '(' .. score, '+inf') or 0
  local to = ask('ZCOUNT', DEAD, score, '+inf') or 0
  while from < to do
    local middle = math.floor((from + to) / 2)
    if before(redis.call('ZREVRANGE', DEAD, middle, middle)[1], after) then
      to = middle
    else
      from = middle + 1
    end
  end
end

local entries = ask('ZREVRANGE', DEAD, from, from + limit, 'WITHSCORES') or {}
local found = {}
for i = 1, math.min(#entries, 2 * limit), 2 do
  local name = entries[i]
  found[#found + 1] = {
    name, entries[i + 1], ask('HGET', EVIDENCE, name) or false, ask('HGETALL', JOB .. name) or {},
    redis.call('TYPE', SPEC .. name).ok == 'string' and 1 or 0,
  }
end
return { found, #entries > 2 * limit and 1 or 0 }
