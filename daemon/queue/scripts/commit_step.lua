-- Makes one step's output of all jobs durable, before any client sees it; may end jobs in the same breath.
-- KEYS  base
-- ARGV  owner, then a job: ref, epoch, state or '', prompt_tokens, preemptions, recomputed_tokens,
--       cached_prompt_tokens (-1 leaves as is), finish_reason, error_reason, error_message, number of chunks,
--       and a chunk: choice, first_index, tokens, ends ('1': its choice), the chunk encoded
-- Gives {{number of the item, why, committed tokens} ...}, {ref to cancel ...}.
-- From  claimed running parked -> running | parked | succeeded | cancelled | failed.
-- A chunk goes in at the committed count of its choice only. One that lies wholly below it was committed before:
-- accepted, nothing is done. So a step can be sent again whenever its reply got lost, also one that ended the job.
local ITEM, CHUNK = 11, 5
local owner = ARGV[1]
local refused, cancel = {}, {}
local now_ms = clock()
local spent = {} -- class and tenant -> cost, and tokens under a quota: charged once, after all items

-- Whether the entry went in. If somebody else wrote into this stream, the job is past saving; its mates are not.
local function write(ref, key, id, chunk)
  local reply = redis.pcall('XADD', key, id, 'c', chunk)
  if type(reply) == 'table' and reply.err then
    conclude_dead(ref, 'BAD_RECORD', 'output: ' .. reply.err, now_ms)
    return false
  end
  return true
end

-- Notes output tokens for the account of a job's tenant.
local function spend(ref, tokens)
  local job = redis.call('HMGET', JOB .. ref, 'sla_class', 'weight', 'metered')
  local class, tenant = job[1] or '', tenant_of(ref)
  local key = class .. '/' .. tenant
  local sum = spent[key] or { class = class, tenant = tenant, cost = 0, metered = 0 }
  sum.cost = sum.cost + cost_of(tokens, job[2])
  sum.metered = sum.metered + (job[3] == '1' and tokens or 0)
  spent[key] = sum
end

-- Field of the record that counts a choice's tokens.
local function counter(choice)
  return choice > 0 and 'output_tokens#' .. int(choice) or 'output_tokens'
end

-- The chunks of an item that are to be written; else nil, why not, and the count it was held against.
local function fitting(ref, first, number)
  local fit = {}
  for at = first, first + (number - 1) * CHUNK, CHUNK do
    local chunk = {
      choice = tonumber(ARGV[at]), first_index = tonumber(ARGV[at + 1]), tokens = tonumber(ARGV[at + 2]),
      ends = ARGV[at + 3] == '1', encoded = ARGV[at + 4],
    }
    local committed = count(redis.call('HGET', JOB .. ref, counter(chunk.choice))) or 0
    local after = chunk.first_index + chunk.tokens
    if chunk.first_index > committed then
      return nil, 'gap', committed
    elseif after > committed and chunk.first_index < committed then
      return nil, 'overlap', committed
    elseif after > committed or (chunk.tokens == 0 and chunk.first_index == committed) then
      fit[#fit + 1] = chunk
    end
  end
  return fit
end

-- Text alone, or an end: each once an index.
local function append_text(ref, key, chunk)
  local last = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  local index, kind = (last and last[1] or ''):match('^(%d+)-(%d+)$')
  if index == int(chunk.first_index) and (kind == '3' or not chunk.ends) then
    return true
  end
  return write(ref, key, int(chunk.first_index) .. (chunk.ends and '-3' or '-1'), chunk.encoded)
end

local function append(ref, chunk)
  local key = output(ref, chunk.choice)
  if chunk.tokens == 0 then
    return append_text(ref, key, chunk)
  elseif not write(ref, key, int(chunk.first_index) .. '-2', chunk.encoded) then
    return false
  end
  redis.call('HSET', JOB .. ref, counter(chunk.choice), int(chunk.first_index + chunk.tokens))
  redis.call('HSETNX', JOB .. ref, 'first_token_ms', int(now_ms))
  spend(ref, chunk.tokens)
  return true
end

local function set(ref, i)
  local changes = {}
  local function put(field, value, nothing)
    if value ~= nothing then
      changes[#changes + 1] = field
      changes[#changes + 1] = value
    end
  end
  put('prompt_tokens', ARGV[i + 3], '-1')
  put('preemptions', ARGV[i + 4], '-1')
  put('recomputed_tokens', ARGV[i + 5], '-1')
  put('cached_prompt_tokens', ARGV[i + 6], '-1')
  put('finish_reason', ARGV[i + 7], '')
  put('error_reason', ARGV[i + 8], '')
  put('error_message', ARGV[i + 9], '')
  if #changes > 0 then
    redis.call('HSET', JOB .. ref, unpack(changes))
  end
end

local function move(ref, state, to, started_ms, wrote)
  if not started_ms and (to == 'running' or wrote) then
    redis.call('HSET', JOB .. ref, 'started_ms', int(now_ms))
    local job = redis.call('HMGET', JOB .. ref, 'sla_class', 'claimed_ms')
    note_start(job[1] or '', now_ms - (count(job[2]) or now_ms))
  end
  if FINAL[to] then
    conclude(ref, to, now_ms)
    return
  end
  if to == '' and wrote and state == 'claimed' then
    to = 'running'
  end
  if to ~= '' and to ~= state then
    redis.call('HSET', JOB .. ref, 'state', to)
  end
  if wrote or to ~= '' then
    redis.call('PUBLISH', NEWS .. ref, to)
  end
end

-- Why the chunks did not go in, and the count they were held against; nil if they are in, now or from before.
local function append_all(ref, first, number)
  local fit, why, committed = fitting(ref, first, number)
  for _, chunk in ipairs(fit or {}) do
    if not append(ref, chunk) then
      return 'final', 0
    end
  end
  return why, committed
end

local i, item = 2, 0
while i <= #ARGV do
  local ref, epoch, to, number = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 10])
  local job = fields(ref, 'state', 'owner', 'epoch', 'output_tokens', 'cancel_requested', 'started_ms') or {}
  local committed = count(job[4]) or 0
  local why = barred(job[1], job[2], job[3], owner, epoch)
  if why == 'final' and to == job[1] and job[3] == epoch then
    why = nil -- the same end, sent again
  elseif not why then
    local held_against
    why, held_against = append_all(ref, i + ITEM, number)
    committed = held_against or committed
    if not why then
      set(ref, i)
      move(ref, job[1], to, job[6], number > 0)
      if job[5] == '1' and not FINAL[to] then
        cancel[#cancel + 1] = ref
      end
    end
  end
  if why then
    refused[#refused + 1] = { item, why, committed }
  end
  i, item = i + ITEM + number * CHUNK, item + 1
end
for _, sum in pairs(spent) do
  charge(sum.class, sum.tenant, sum.cost)
  if sum.metered > 0 then
    meter(sum.tenant, sum.metered, now_ms)
  end
end
return { refused, cancel }
