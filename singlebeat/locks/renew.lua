--- renew: keep the lock of a request alive while its worker lives; never take one, never resurrect one.
--
-- KEYS[1]  lock      hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload
-- KEYS[2]  done      zset: "id:generation" of runs that ended under this lock lately, by time (ms)
-- ARGV[1]  id        task id of the request
-- ARGV[2]  gen       its generation
-- ARGV[3]  nonce     names this delivery of the message
-- ARGV[4]  lease_ms  how long the lock outlives the worker
--
-- returns  running  renewed; this delivery is the run that holds the lock
--          queued   renewed; the message has not started yet
--          over     this generation ended or handed over: nothing to renew
--          lost     the lock expired or somebody else holds it

local lock, done = KEYS[1], KEYS[2]
local id, gen, nonce, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

if redis.call("ZSCORE", done, id .. ":" .. gen) then
  return "over"
end
local record = redis.call("HMGET", lock, "id", "gen", "state", "nonce", "until")
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
  local time = redis.call("TIME")
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  ttl = math.max(1, math.min(ttl, record[5] - now))
end
redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
return state
