-- Makes one step's output of all jobs durable, before any client sees it; may end jobs in the same breath.
-- KEYS  base
-- ARGV  owner, then 13 a job: ref, epoch, state or '', first_index, tokens, encoded chunk or '',
--       prompt_tokens, preemptions, recomputed_tokens, cached_prompt_tokens (-1 leaves as is),
--       finish_reason, error_reason, error_message
-- Gives {{number of the item, why, committed tokens} ...}, {ref to cancel ...}.
-- From  claimed running parked -> running | parked | succeeded | cancelled | failed.
-- A chunk goes in at the committed count only. One that lies wholly below it was committed before: accepted,
-- nothing is done. So a step can be sent again whenever its reply got lost, also one that ended the job.
local ITEM = 13
local owner = ARGV[1]
local refused, cancel = {}, {}
local now_ms = clock()

-- Whether the entry went in. If somebody else wrote into this stream, the job is past saving; its mates are not.
local function write(ref, id, chunk)
  local reply = redis.pcall('XADD', OUT .. ref, id, 'c', chunk)
  if type(reply) == 'table' and reply.err then
    conclude_dead(ref, 'BAD_RECORD', 'output: ' .. reply.err, now_ms)
    return false
  end
  return true
end

-- nil when the chunk is in (now or from before), else why not
local function append(ref, committed, first_index, tokens, chunk)
  if first_index > committed then
    return 'gap'
  elseif tokens > 0 then
    if first_index + tokens <= committed then
      return nil
    elseif first_index < committed then
      return 'overlap'
    end
    if not write(ref, int(first_index) .. '-2', chunk) then
      return 'final'
    end
    redis.call('HSET', JOB .. ref, 'output_tokens', int(committed + tokens))
    if committed == 0 then
      redis.call('HSET', JOB .. ref, 'first_token_ms', int(now_ms))
    end
  elseif first_index == committed then -- text alone: once an index
    local last = redis.pcall('XREVRANGE', OUT .. ref, '+', '-', 'COUNT', 1)[1]
    if not (last and last[1]:match('^%d+') == int(first_index))
      and not write(ref, int(first_index) .. '-1', chunk) then
      return 'final'
    end
  end
  return nil
end

local function set(ref, i)
  local changes = {}
  local function put(field, value, nothing)
    if value ~= nothing then
      changes[#changes + 1] = field
      changes[#changes + 1] = value
    end
  end
  put('prompt_tokens', ARGV[i + 6], '-1')
  put('preemptions', ARGV[i + 7], '-1')
  put('recomputed_tokens', ARGV[i + 8], '-1')
  put('cached_prompt_tokens', ARGV[i + 9], '-1')
  put('finish_reason', ARGV[i + 10], '')
  put('error_reason', ARGV[i + 11], '')
  put('error_message', ARGV[i + 12], '')
  if #changes > 0 then
    redis.call('HSET', JOB .. ref, unpack(changes))
  end
end

local function move(ref, state, to, started_ms, wrote)
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
  if not started_ms and (to == 'running' or wrote) then
    redis.call('HSET', JOB .. ref, 'started_ms', int(now_ms))
  end
  if wrote or to ~= '' then
    redis.call('PUBLISH', NEWS .. ref, to)
  end
end

for i = 2, #ARGV, ITEM do
  local ref, epoch, to, chunk = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 5]
  local job = fields(ref, 'state', 'owner', 'epoch', 'output_tokens', 'cancel_requested', 'started_ms') or {}
  local committed = count(job[4]) or 0
  local why = barred(job[1], job[2], job[3], owner, epoch)
  if why == 'final' and to == job[1] and job[3] == epoch then
    why = nil -- the same end, sent again
  elseif not why then
    if chunk ~= '' then
      why = append(ref, committed, tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4]), chunk)
    end
    if not why then
      set(ref, i)
      move(ref, job[1], to, job[6], chunk ~= '')
      if job[5] == '1' and not FINAL[to] then
        cancel[#cancel + 1] = ref
      end
    end
  end
  if why then
    refused[#refused + 1] = { (i - 2) / ITEM, why, committed }
  end
end
return { refused, cancel }
