--- renew: renew the locks of requests while their worker lives; never acquire or revive a lock.
--
-- KEYS[1...]  two for each request:
--             lock      hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload; worker and
--                       renewed (ms): the worker and time of the last renewal, the time alone for a run of another
--                       program, and as in begin; sent: a note of the sender, JSON
--             done      zset, by time (ms): "id:generation" of runs that ended under this lock recently, with
--                       ":delivery:over" behind it for a while; "delivery:lost" of those that ended without it; and
--                       "id:generation:unsent", as in finish: it is renewed in place of a lock
-- ARGV[1]  lease_ms  ms that a lock outlives the worker; 0: it lasts as long as before, and shows that its message lives
-- ARGV[2]  requests  JSON, one array for each: [task id, its generation, name of this delivery of the message, note of
--                    the sender for a queued lock, or empty]
-- ARGV[3]  worker    the worker that has the messages; empty: the caller is no worker
--
-- returns  JSON, one word for each request:
--          running  renewed; this delivery is the run that holds the lock, or what follows it may be unsent
--          queued   renewed; no run holds the lock
--          over     this generation has ended or has handed its lock over: nothing to renew
--          lost     the lock expired, or another id, generation or delivery holds it, or it was so when this run ended
--
-- Uses numbers.

local lease, worker = tonumber(ARGV[1]), ARGV[3]
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function renew(lock, done, id, gen, nonce, note)
  local record = redis.pcall("HMGET", lock, "id", "gen", "state", "nonce", "until")
  if record.err then
    return string.find(record.err, "WRONGTYPE", 1, true) and "lost" or record
  end
  local run = id .. ":" .. gen
  local unsent = run .. ":unsent"
  local ended = redis.pcall("ZMSCORE", done, run, nonce .. ":lost", table.concat({run, nonce, "over"}, ":"), unsent)
  if not ended.err and ended[3] and ended[4] and not ended[1] then
    redis.pcall("ZADD", done, string.format("%.0f", now), unsent) -- the server's memory may be full
    return ended[2] and "lost" or "running"
  end
  if not ended.err and (ended[1] or ended[3]) then -- a key of another type remembers nothing
    return ended[2] and "lost" or "over"
  end
  if record[1] ~= id or record[2] ~= gen then
    return "lost"
  end
  local state = record[3]
  if state == "running" and record[4] ~= nonce then
    return "lost"
  end

  if lease > 0 then
    local ttl = lease
    if state ~= "running" then
      ttl = math.max(ttl, redis.call("PTTL", lock))
    end
    if record[5] and numbers(nil, {record[5]}) then
      ttl = math.max(1, math.min(ttl, record[5] - now))
    end
    redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
  end
  -- For people only: a server whose memory is full refuses these writes, but the lock is renewed.
  if worker ~= "" then
    redis.pcall("HSET", lock, "worker", worker, "renewed", string.format("%.0f", now))
  elseif state == "running" then
    redis.pcall("HSET", lock, "renewed", string.format("%.0f", now))
  end
  if note ~= "" and state ~= "running" then
    redis.pcall("HSET", lock, "sent", note)
  end
  return state == "running" and state or "queued"
end

local replies = {}
for i, request in ipairs(cjson.decode(ARGV[2])) do
  replies[i] = renew(KEYS[2 * i - 1], KEYS[2 * i], unpack(request))
  if replies[i].err then
    return replies[i]
  end
end
return cjson.encode(replies)
