--- acquire: take the lock of a call that is about to be sent, or learn who holds it.
--
-- KEYS[1]  lock       hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload
-- KEYS[2]  done       zset: "id:generation" of runs that ended under this lock lately, by time (ms)
-- ARGV[1]  id         task id of the call; it may ask again (a repeated publish)
-- ARGV[2]  ttl_ms     how long its message may wait
-- ARGV[3]  expiry_ms  absolute bound of the lock from now on, 0 for none
-- ARGV[4]  task       name, for people
-- ARGV[5]  args       arguments, for people
-- ARGV[6]  again      1: the id may have been sent before, so refuse it if it ended; 0: it is new
-- ARGV[7]  payload    what the run that takes the lock is to find; empty: nothing
-- ARGV[8]  replace    what to do to another id that holds the lock and has not started: "payload" gives it our payload,
--                     "holder" takes the lock away from it; empty: nothing
--
-- returns  {verdict, id of the holder, state, since (ms), fence, ttl (ms)}
--          acquired  the lock is queued under our id
--          running   our id holds it and has started: do not send again
--          done      our id ended under this lock: do not send again
--          held      another id holds it; nothing was written but, if asked so, the payload

local lock, done = KEYS[1], KEYS[2]
local id, ttl, expiry = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local task, args, again, payload, replace = ARGV[4], ARGV[5], ARGV[6] == "1", ARGV[7], ARGV[8]

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function reply(verdict)
  local r = redis.call("HMGET", lock, "id", "state", "since", "fence")
  return {verdict, r[1] or id, r[2] or "", r[3] or "0", r[4] or "0", redis.call("PTTL", lock)}
end

if again and redis.call("ZSCORE", done, id .. ":0") then
  return reply("done")
end
local holder = redis.call("HGET", lock, "id")
local state = redis.call("HGET", lock, "state")
if holder and holder ~= id and state == "queued" and replace == "holder" then
  redis.call("DEL", lock)
  holder = false
end
if holder and holder ~= id then
  if state == "queued" and replace == "payload" then
    redis.call("HSET", lock, "payload", payload)
  end
  return reply("held")
end
if state == "running" and holder then
  return reply("running")
end

if not holder then
  redis.call("HSET", lock, "id", id, "gen", 0, "state", "queued", "nonce", "",
    "task", task, "args", args, "since", string.format("%.0f", now), "payload", payload)
  if expiry > 0 then
    redis.call("HSET", lock, "until", string.format("%.0f", now + expiry))
  end
  redis.call("ZREM", done, id .. ":0")
end
local bound = redis.call("HGET", lock, "until")
if bound then
  ttl = math.max(1, math.min(ttl, bound - now))
end
redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
return reply("acquired")
