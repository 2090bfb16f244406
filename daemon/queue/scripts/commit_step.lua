-- Makes one step's output of all jobs durable, before any client sees it; may end jobs in the same breath.
-- KEYS  base
-- ARGV  owner, then all jobs as one MessagePack list. A job: ref, epoch, state or '', prompt_tokens, preemptions,
--       recomputed_tokens, cached_prompt_tokens ('-1' leaves as is), finish_reason, error_reason, error_message, chunks;
--       text but for the last, of which each is: choice, first_index, tokens, whether it ends its choice, it encoded
-- Gives {{number of the item, why, committed tokens} ...}, {ref to cancel ...}.
-- From  claimed running parked -> running | parked | succeeded | cancelled | failed.
-- A chunk goes in at the committed count of its choice only. One that lies wholly below it was committed before:
-- accepted, nothing is done. So a step can be sent again whenever its reply got lost, also one that ended the job.
local owner, items = ARGV[1], cmsgpack.unpack(ARGV[2])
local refused, cancel = {}, {}
local now_ms = clock()
local spent = {} -- class and tenant -> cost, and tokens under a quota: charged once, after all items

-- What is known of the job at hand, and what of it has changed: written at once, however much came of it.
local job, changes

local function change(field, value)
  changes[#changes + 1] = field
  changes[#changes + 1] = value
end

local function write_changes(ref)
  if #changes > 0 then
    redis.call('HSET', JOB .. ref, unpack(changes))
    changes = {}
  end
end

-- Whether the entry went in. If somebody else wrote into this stream, the job is past saving; its mates are not.
local function write(ref, key, id, chunk)
  local reply = redis.pcall('XADD', key, id, 'c', chunk)
  if type(reply) == 'table' and reply.err then
    write_changes(ref)
    conclude_dead(ref, 'BAD_RECORD', 'output: ' .. reply.err, now_ms)
    return false
  end
  return true
end

-- Notes output tokens for the account of a job's tenant.
local function spend(ref, tokens)
  local class, tenant = job.sla_class or '', tenant_of(ref)
  local key = class .. '/' .. tenant
  local sum = spent[key] or { class = class, tenant = tenant, cost = 0, metered = 0 }
  sum.cost = sum.cost + cost_of(tokens, job.weight)
  sum.metered = sum.metered + (job.metered == '1' and tokens or 0)
  spent[key] = sum
end

-- Field of the record that counts a choice's tokens.
local function counter(choice)
  return choice > 0 and 'output_tokens#' .. int(choice) or 'output_tokens'
end

-- The chunks of an item that are to be written; else nil, why not, and the count it was held against.
local function fitting(ref, chunks)
  local fit = {}
  for _, given in ipairs(chunks) do
    local chunk = {
      choice = given[1], first_index = given[2], tokens = given[3], ends = given[4], encoded = given[5],
    }
    local committed = job.output_tokens
    if chunk.choice > 0 then
      committed = redis.call('HGET', JOB .. ref, counter(chunk.choice))
    end
    committed = count(committed) or 0
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
  change(counter(chunk.choice), int(chunk.first_index + chunk.tokens))
  if not job.first_token_ms then
    job.first_token_ms = int(now_ms)
    change('first_token_ms', job.first_token_ms)
  end
  spend(ref, chunk.tokens)
  return true
end

local function set(item)
  local function put(field, value, nothing)
    if value ~= nothing and value ~= job[field] then
      change(field, value)
    end
  end
  put('prompt_tokens', item[4], '-1')
  put('preemptions', item[5], '-1')
  put('recomputed_tokens', item[6], '-1')
  put('cached_prompt_tokens', item[7], '-1')
  put('finish_reason', item[8], '')
  put('error_reason', item[9], '')
  put('error_message', item[10], '')
end

local function move(ref, to, wrote)
  if not job.started_ms and (to == 'running' or wrote) then
    change('started_ms', int(now_ms))
    note_start(job.sla_class or '', now_ms - (count(job.claimed_ms) or now_ms))
  end
  if FINAL[to] then
    write_changes(ref)
    conclude(ref, to, now_ms)
    return
  end
  if to == '' and wrote and job.state == 'claimed' then
    to = 'running'
  end
  if to ~= '' and to ~= job.state then
    change('state', to)
  end
  write_changes(ref)
  if wrote or to ~= '' then
    redis.call('PUBLISH', NEWS .. ref, to)
  end
end

-- Why the chunks did not go in, and the count they were held against; nil if they are in, now or from before.
local function append_all(ref, chunks)
  local fit, why, committed = fitting(ref, chunks)
  for _, chunk in ipairs(fit or {}) do
    if not append(ref, chunk) then
      return 'final', 0
    end
  end
  return why, committed
end

-- All that is asked of a job, with one call: there is one a job and step.
local FIELDS = {
  'state', 'owner', 'epoch', 'output_tokens', 'cancel_requested', 'started_ms', 'first_token_ms', 'claimed_ms',
  'sla_class', 'weight', 'metered', 'prompt_tokens', 'preemptions',
}

local function read(ref)
  local values, found = fields(ref, unpack(FIELDS)) or {}, {}
  for place, name in ipairs(FIELDS) do
    found[name] = values[place] or nil
  end
  return found
end

for place, item in ipairs(items) do
  local ref, epoch, to, chunks = item[1], item[2], item[3], item[11]
  job, changes = read(ref), {}
  local committed = count(job.output_tokens) or 0
  local why = barred(job.state, job.owner, job.epoch, owner, epoch)
  if why == 'final' and to == job.state and job.epoch == epoch then
    why = nil -- the same end, sent again
  elseif not why then
    local held_against
    why, held_against = append_all(ref, chunks)
    committed = held_against or committed
    if not why then
      set(item)
      move(ref, to, #chunks > 0)
      if job.cancel_requested == '1' and not FINAL[to] then
        cancel[#cancel + 1] = ref
      end
    end
  end
  if why then
    refused[#refused + 1] = { place - 1, why, committed }
  end
end
for _, sum in pairs(spent) do
  charge(sum.class, sum.tenant, sum.cost)
  if sum.metered > 0 then
    meter(sum.tenant, sum.metered, now_ms)
  end
end
return { refused, cancel }
