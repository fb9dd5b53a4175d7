--- finish: free the locks of requests that are over; the locks of other requests stay.
--
-- A run that has promised its lock to its retry hands the lock over, unless the retry is over before the run.
--
-- KEYS[1...]  three for each request:
--             lock      hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload, next,
--                       next_ttl (ms); uncut (ms), as in acquire
--             done      zset, by time (ms): "id:generation" of runs that ended under this lock recently, for REPEATED ms
--                       with ":delivery:over" behind it; "delivery:lost" of those that ended without the lock; and
--                       "id:generation:unsent" of those of which what follows them may be unsent
--             turn      hash, as lock: the call that waits for the end of the holder, and runs by itself; the turn of a
--                       request that is over is freed
-- ARGV[1]  done_ms   ms for which the end of a run is remembered; 0: no end is remembered
-- ARGV[2]  ran       2: the requests have run under their locks; 1: they have run, perhaps without them, even if their
--                    locks say otherwise; 0: they may not have started
-- ARGV[3]  unsent    1: what follows the runs, such as the next step of a chain, or the rejections of their messages may
--                    be unsent: another delivery of the message may run after a lease, until another call says that
--                    they are over; 0: they are over
-- ARGV[4]  requests  JSON, one array for each: [task id, its generation, name of this delivery of the message, or empty
--                    if the message was never delivered]
--
-- returns  JSON, one string for each request
--          finished  this run held the lock: the lock is free or its retry's, and the end is remembered
--          released  the message held the lock, and its run did not: the lock is free
--          lost      this run has ended, had taken the lock, and did not hold it any more: it was free, or another held it
--          kept      the lock is free already, or another run, generation or id holds it, or the key has another type;
--                    a promise of the lock to this message is taken back
--
-- Uses numbers. A repetition replies "lost" again, or else "kept", and writes nothing but that a run is over that had
-- something unsent: the main process repeats what the run itself has done, and meanwhile a new call may have the same id.

local REPEATED = 60000 -- ms in which a repetition may follow

local done_ms, ran, took, unsent = tonumber(ARGV[1]), ARGV[2] ~= "0", ARGV[2] == "2", ARGV[3] == "1"
local time = redis.call("TIME")
local now = string.format("%.0f", time[1] * 1000 + math.floor(time[2] / 1000))

local function finish(lock, done, turn, id, gen, nonce)
  local run = id .. ":" .. gen
  local over = table.concat({run, nonce, "over"}, ":")
  -- A key of another type remembers nothing and is no error.
  local ended = redis.pcall("ZMSCORE", done, run, nonce .. ":lost", over, run .. ":unsent")
  if ended.err and done_ms > 0 and not string.find(ended.err, "WRONGTYPE", 1, true) then
    return ended
  end
  if ended[3] then
    if ran and not unsent and ended[4] and not ended[1] then
      redis.call("ZADD", done, now, run)
    end
    return ended[2] and "lost" or "kept"
  end
  local by_itself = redis.pcall("HMGET", turn, "id", "gen")
  if by_itself[1] == id and (tonumber(by_itself[2]) or 0) <= tonumber(gen) then
    redis.call("DEL", turn)
  end
  local record = redis.pcall("HMGET", lock, "id", "gen", "state", "nonce", "next", "next_ttl", "until")
  if record.err then
    return string.find(record.err, "WRONGTYPE", 1, true) and "kept" or record
  end
  local ours = record[1] == id and record[2] == gen
  if record[1] == id and record[5] == gen and not ours then
    redis.call("HDEL", lock, "next", "next_ttl")
  end
  local holds = ours and record[3] == "running" and record[4] == nonce
  local unstarted = ours and record[3] ~= "running"
  local another = ours and not holds and not unstarted

  local ends = not ended.err and not ended[1] and (holds or (ran and not another))
  local loses = not ended.err and not ended[1] and not ended[2] and took and nonce ~= "" and not holds and not unstarted
  if done_ms > 0 and (ends or loses) then
    local ttl = string.format("%.0f", math.max(done_ms, redis.call("PTTL", done)))
    redis.call("PEXPIRE", done, ttl) -- if this is forbidden, nothing is written that would stay for ever
    redis.call("ZREMRANGEBYSCORE", done, "-inf", string.format("%.0f", now - done_ms))
    if ends then
      redis.call("ZADD", done, now, unsent and run .. ":unsent" or run)
    end
    if loses then
      redis.call("ZADD", done, now, nonce .. ":lost")
    end
    redis.call("PEXPIRE", done, ttl)
  end
  local reply = holds and "finished" or "released"
  if not holds and not unstarted then
    reply = (loses or (not ended.err and ended[2])) and "lost" or "kept"
  elseif holds and record[5] and record[6] and numbers(nil, {record[6], record[7]}) then
    local ttl = tonumber(record[6])
    if record[7] then
      redis.call("HSET", lock, "uncut", string.format("%.0f", now + ttl))
      ttl = math.max(1, math.min(ttl, record[7] - now))
    end
    redis.call("HSET", lock, "gen", record[5], "nonce", "", "state", "queued", "since", now, "payload", "")
    redis.call("HDEL", lock, "next", "next_ttl")
    redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
  else
    redis.call("DEL", lock)
  end
  if done_ms > 0 and ends and nonce ~= "" then -- last: if the lock could not be freed, a repetition must do it
    local time_left = unsent and done_ms or REPEATED
    redis.call("ZADD", done, string.format("%.0f", now - math.max(0, done_ms - time_left)), over)
  end
  return reply
end

local replies = {}
for i, request in ipairs(cjson.decode(ARGV[4])) do
  replies[i] = finish(KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i], unpack(request))
  if replies[i].err then
    return replies[i]
  end
end
return cjson.encode(replies)
