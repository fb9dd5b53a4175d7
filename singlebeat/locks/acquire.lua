--- acquire: take the locks of calls that are about to be sent, or learn who holds them.
--
-- KEYS[1...]  two for each call:
--             lock       hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload
--             done       zset: "id:generation" of runs that ended under this lock lately, by time (ms), and
--                        "id:replaced" of calls that lost it before they started, by the time until which they wait
-- ARGV[1]  again      1: the ids may have been sent before, so refuse those that have ended; 0: they are new
-- ARGV[2]  calls      JSON, one array for each call:
--          id         task id of the call; it may ask again (a repeated publish)
--          gen        generation of its message: higher than 0 if it replaces another task
--          ttl        how long its message may wait (ms); a call that it replaces is remembered as long, or longer if
--                     that one may wait longer
--          expiry     absolute bound of the lock from now on (ms), 0 for none
--          task       name, for people
--          args       arguments, for people
--          payload    what the run that takes the lock is to find; empty: nothing
--          replace    what to do to another id that holds the lock and has not started: "payload" gives it our payload,
--                     "holder" takes the lock away from it, and it will not start; empty: nothing
--
-- returns  JSON, one array for each call: [verdict, id of the holder, state, since (ms), fence, ttl (ms)]
--          acquired  the lock is queued under our id
--          running   our id holds it and has started: do not send again
--          done      our id ended under this lock: do not send again; another id may hold it now
--          held      another id holds it; nothing was written but, if asked so, the payload
--          unusable  its keys cannot be read; the second is the server's reason; nothing was written

local again = ARGV[1] == "1"
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function reply(verdict, lock, id)
  local r = redis.call("HMGET", lock, "id", "state", "since", "fence")
  return {verdict, r[1] or id, r[2] or "", r[3] or "0", r[4] or "0", redis.call("PTTL", lock)}
end

local function acquire(lock, done, id, gen, ttl, expiry, task, args, payload, replace)
  local record = redis.pcall("HMGET", lock, "id", "state", "until")
  local ended = redis.pcall("ZMSCORE", done, id .. ":" .. gen, id .. ":replaced")
  if record.err or ended.err then
    return {"unusable", record.err or ended.err, "", "0", "0", 0}
  end
  local has_ended = ended[1] or ended[2]
  if again and has_ended then
    return reply("done", lock, id)
  end
  local holder, state, bound = record[1], record[2], record[3]
  if holder and holder ~= id and state == "queued" and replace == "holder" then
    local waits = math.max(redis.call("PTTL", lock), ttl)
    redis.call("DEL", lock)
    redis.call("ZADD", done, string.format("%.0f", now + waits), holder .. ":replaced")
    redis.call("PEXPIRE", done, string.format("%.0f", math.max(waits, redis.call("PTTL", done))))
    holder, bound = false, false
  end
  if holder and holder ~= id then
    if state == "queued" and replace == "payload" then
      redis.call("HSET", lock, "payload", payload)
    end
    return reply("held", lock, id)
  end
  if holder and state == "running" then
    return reply("running", lock, id)
  end

  local since = string.format("%.0f", now)
  if not holder then
    redis.call("HSET", lock, "id", id, "gen", gen, "state", "queued", "nonce", "",
      "task", task, "args", args, "since", since, "payload", payload)
    if expiry > 0 then
      bound = now + expiry
      redis.call("HSET", lock, "until", string.format("%.0f", bound))
    end
    if has_ended then
      redis.call("ZREM", done, id .. ":" .. gen, id .. ":replaced")
    end
  end
  if bound then
    ttl = math.max(1, math.min(ttl, bound - now))
  end
  redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
  return holder and reply("acquired", lock, id) or {"acquired", id, "queued", since, "0", ttl}
end

local replies = {}
for i, call in ipairs(cjson.decode(ARGV[2])) do
  replies[i] = acquire(KEYS[2 * i - 1], KEYS[2 * i], unpack(call))
end
return cjson.encode(replies)
