--- finish: free the lock of a request that is over; of any other request's lock nothing changes.
--
-- KEYS[1]  lock     hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload
-- KEYS[2]  done     zset: "id:generation" of runs that ended under this lock lately, by time (ms)
-- ARGV[1]  id       task id of the request
-- ARGV[2]  gen      its generation
-- ARGV[3]  nonce    names this delivery of the message; empty: it was never delivered
-- ARGV[4]  done_ms  how long the end of a run is remembered
--
-- returns  {verdict, payload of the lock that is free now, or an empty text}
--          finished  this run held the lock: it is free, and the end is remembered
--          released  the message held the lock but never started: it is free
--          kept      the lock is free already, or another run, generation or id holds it

local lock, done = KEYS[1], KEYS[2]
local id, gen, nonce, done_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local record = redis.call("HMGET", lock, "id", "gen", "state", "nonce", "payload")
if record[1] ~= id or record[2] ~= gen then
  return {"kept", ""}
end
if record[3] == "queued" then
  redis.call("DEL", lock)
  return {"released", record[5] or ""}
end
if record[4] ~= nonce then
  return {"kept", ""}
end

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call("DEL", lock)
redis.call("ZREMRANGEBYSCORE", done, "-inf", string.format("%.0f", now - done_ms))
redis.call("ZADD", done, string.format("%.0f", now), id .. ":" .. gen)
redis.call("PEXPIRE", done, string.format("%.0f", done_ms))
return {"finished", record[5] or ""}
