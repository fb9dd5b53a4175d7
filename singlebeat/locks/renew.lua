--- renew: keep the locks of requests alive while their worker lives; never take one, never resurrect one.
--
-- KEYS[1...]  two for each request:
--             lock      hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload; worker and
--                       renewed (ms): who has renewed it last, and when, the latter alone if that is no worker and the
--                       lock is a run's; sent: a note of the sender
--             done      zset: "id:generation" of runs that ended under this lock lately, by time (ms)
-- ARGV[1]  lease_ms  how long a lock outlives the worker
-- ARGV[2]  requests  JSON, one array for each: [task id, its generation, name of this delivery of the message, note of
--                    the sender for a lock that is queued; empty: none]
-- ARGV[3]  worker    the worker that has the messages; empty: it is no worker that renews
--
-- returns  JSON, one word for each request:
--          running  renewed; this delivery is the run that holds the lock
--          queued   renewed; the message has not started yet
--          over     this generation ended or handed over: nothing to renew
--          lost     the lock expired or somebody else holds it

local lease, worker = tonumber(ARGV[1]), ARGV[3]
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function renew(lock, done, id, gen, nonce, note)
  local record = redis.pcall("HMGET", lock, "id", "gen", "state", "nonce", "until")
  if record.err then
    return string.find(record.err, "WRONGTYPE", 1, true) and "lost" or record
  end
  if type(redis.pcall("ZSCORE", done, id .. ":" .. gen)) == "string" then -- what is no zset remembers nothing
    return "over"
  end
  if record[1] ~= id or record[2] ~= gen then
    return "lost"
  end
  local state = record[3]
  if state == "running" and record[4] ~= nonce then
    return "lost"
  end

  local ttl = lease
  if state == "queued" then
    ttl = math.max(ttl, redis.call("PTTL", lock))
  end
  if record[5] then
    ttl = math.max(1, math.min(ttl, record[5] - now))
  end
  redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
  -- Refused by a server whose memory is full, which renews all the same.
  if worker ~= "" then
    redis.pcall("HSET", lock, "worker", worker, "renewed", string.format("%.0f", now))
  elseif state == "running" then
    redis.pcall("HSET", lock, "renewed", string.format("%.0f", now))
  end
  if note ~= "" and state == "queued" then
    redis.pcall("HSET", lock, "sent", note)
  end
  return state
end

local replies = {}
for i, request in ipairs(cjson.decode(ARGV[2])) do
  replies[i] = renew(KEYS[2 * i - 1], KEYS[2 * i], unpack(request))
  if replies[i].err then
    return replies[i]
  end
end
return cjson.encode(replies)
