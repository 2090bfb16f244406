-- Reads a tenant's jobs, newest first. Changes nothing but index entries whose job has expired.
-- KEYS  base
-- ARGV  tenant (quoted), state or '', cursor or '', limit, most entries to look at
-- Gives {{record ...}, next cursor or ''}. The cursor is the arrival of the last entry looked at.
local tenant, state, limit, look = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local from = ARGV[3] == '' and '+inf' or '(' .. ARGV[3]
local entries = redis.call('ZREVRANGEBYSCORE', TENANT .. tenant, from, '-inf', 'WITHSCORES', 'LIMIT', 0, look)
local found = {}
for i = 1, #entries, 2 do
  local job = fields(entries[i], 'state')
  if not job or not job[1] then
    redis.call('ZREM', TENANT .. tenant, entries[i])
  elseif state == '' or job[1] == state then
    found[#found + 1] = redis.call('HGETALL', JOB .. entries[i])
    if #found == limit and i + 1 < #entries then
      return { found, int(tonumber(entries[i + 1])) }
    end
  end
end
local more = #entries == 2 * look
return { found, more and int(tonumber(entries[#entries])) or '' }
