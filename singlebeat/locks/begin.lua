--- begin: start a run, or return the verdict that forbids the start.
--
-- KEYS[1]  lock       hash: id, gen, state, nonce, fence, task, args, entry, since (ms), until (ms), payload, next; worker,
--                     renewed (ms) and sent, as in renew, of earlier deliveries; took_free: 1 if its call had neither the
--                     lock nor the place behind when it started, so that calls without them may be newer
-- KEYS[2]  done       zset: "id:generation" of runs that ended under this lock recently, by time (ms), with ":unsent"
--                     behind it if what follows them may be unsent; and "id:replaced" of calls that were evicted before
--                     they started, by the end (ms) of their wait
-- KEYS[3]  queued     hash, as lock: the lock of the message while it is queued; KEYS[1] if the lock is the same
-- KEYS[4]  behind     hash, as lock, and if_held, taken: the call that waits for the end of the holder; renewed (ms)
--                     alone: the time at which its message has asked last, in vain
-- KEYS[5]  turn       hash, as lock: the call that waits for the end of the holder, and runs by itself
-- ARGV[1]  id         task id of the message
-- ARGV[2]  gen        its generation: a whole number, higher after each retry or replace; its decimals are higher after
--                     each time that the message has come back after a worker's rejection
-- ARGV[3]  nonce      names this delivery of the message
-- ARGV[4]  lease_ms   ms that the lock outlives the worker
-- ARGV[5]  expiry_ms  ms until a lock without a bound ends in any case, 0 for no bound
-- ARGV[6]  task       name, for people
-- ARGV[7]  args       arguments, for people
-- ARGV[8]  done_ms    ms for which the end of a generation is remembered
-- ARGV[9]  turn_ms    ms for which its turn lasts: if the lock is held, the message is sent again, and until then it
--                     has the turn if the turn is free, or keeps its place behind; 0: the message is not sent again
-- ARGV[10] entry      name of the schedule's entry that sent the message, for people; empty: a program sent it
-- ARGV[11] waits_since  the server's time (ms) since which the message waits, as an earlier reply gave it; 0: not known
-- ARGV[12] note       for the field "sent" of a lock that the message did not hold, as in acquire; empty: none
-- ARGV[13] overtakes  1: the message takes this lock from a newer call that has not started; 0: it does not
-- ARGV[14] yields     1: the message is not sent again, and needs no turn, if another call has the place behind; 0: it is
-- ARGV[15] deadline   the server's time (ms) after which no caller waits for the reply
--
-- returns  {verdict, id of the holder, state, since (ms), fence, ttl (ms), payload, entry}; if held, also {time since
--          which the message waits (ms), ms since which the holder is in its state: 0 unless the message has the turn,
--          and "older" if the holder may be older than the message, "heir" if another call has the place behind it, else ""}
--          started   the run holds the lock, and its queued lock is free; fence is its fencing number, payload the
--                    arguments of the latest call that it stands for, or an empty string
--          copy      another delivery of the same message runs under a live lease, or has run less than a lease ago,
--                    and may be about to send what follows it
--          stale     a later generation of the same id holds the lock
--          done      this generation of the id has ended before
--          replaced  another call has evicted our id while it was queued
--          held      another id holds the lock, or waits for it and came first; nothing was written but our turn, or
--                    the time in our place. Or a run of an earlier generation of our id, which has not ended, holds it
--          unusable  a key has another type or holds other data, or a field that must be a number is none; the second
--                    value is the reason; nothing was written
--          late      the deadline has passed; the fourth value is the server's time; nothing was written
--
-- Uses numbers, wrong_field, no_lock and shorten. A repetition by the same delivery gives the same reply, and writes
-- nothing but the lease of its turn and the time in its place. Of locks that would last longer than they should, because
-- the server's clock was set back, each message shortens the time.
--
-- A message may wait for longer than its lock lasts, and a newer call may acquire the lock meanwhile. In a long queue, each
-- would be dropped for a newer one, and none would run. So the older one may overtake: the newer one then has no lock
-- until it starts.

local lock, done, queued, behind, turn = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, gen, nonce, lease = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local expiry, task, args, done_ms = tonumber(ARGV[5]), ARGV[6], ARGV[7], tonumber(ARGV[8])
local turn_ms, entry, waits_since = tonumber(ARGV[9]), ARGV[10], tonumber(ARGV[11])

local PATIENCE = 30000 -- ms that a call may wait until no newer one overtakes it

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

if now > tonumber(ARGV[15]) then
  return {"late", "", "", string.format("%.0f", now), "0", 0, "", ""}
end

local function reply(verdict, holds)
  local r = redis.call("HMGET", holds or lock, "id", "state", "since", "fence", "payload", "entry")
  local payload = verdict == "started" and r[5] or ""
  local since = numbers(nil, {r[3]}) and (tonumber(r[3]) or 0) <= now + 1000 and r[3] -- a turn may be a moment ahead
  local fence = numbers(nil, {r[4]}) and r[4]
  return {verdict, r[1] or id, r[2] or "", since or "0", fence or "0", redis.call("PTTL", holds or lock), payload,
    r[6] or ""}
end

local record = redis.pcall("HMGET", lock, "id", "gen", "state", "nonce", "until", "fence", "next", "since", "renewed",
  "payload", "entry")
local ended = redis.pcall("ZMSCORE", done, id .. ":" .. ARGV[2], id .. ":replaced", id .. ":" .. ARGV[2] .. ":unsent")
local waiting = queued == lock and {} or redis.pcall("HMGET", queued, "id", "payload")
local place = redis.pcall("HMGET", behind, "id", "if_held", "taken", "since", "until")
local by_itself = redis.pcall("HMGET", turn, "id", "since")
local err = record.err or ended.err or waiting.err or place.err or by_itself.err
if err and not string.find(err, "WRONGTYPE", 1, true) then
  return redis.error_reply(err)
elseif err then
  return {"unusable", err, "", "0", "0", 0, ""}
end
local wrong = wrong_field({"", "gen", "until", "fence"}, {record[2], record[5], record[6]})
  or wrong_field({behind .. ": ", "taken", "since", "until"}, {place[3], place[4], place[5]})
  or wrong_field({turn .. ": ", "since"}, {by_itself[2]})
  or (record[1] and not record[2] and "its field gen must be a number, and is missing")
  or no_lock({lock, behind, turn}, {record[1], place[1], by_itself[1]})
if wrong then
  return {"unusable", wrong, "", "0", "0", 0, ""}
end
if ended[1] then
  return reply("done")
end
if ended[2] then
  return reply("replaced")
end
if ended[3] and math.abs(now - ended[3]) < lease then
  return reply("copy")
end
local holder, held_gen, state, held_nonce = record[1], tonumber(record[2]), record[3], record[4]
shorten({lock}, {now, state, record[8], record[9]})
shorten({behind}, {now, "queued", place[4]})
shorten({turn}, {now, "queued", by_itself[2]})
local other = place[2] ~= "" and place[1] ~= id and place[1]
local in_turn, taken = by_itself[1], tonumber(place[3] or place[4]) or 0
-- Of the two waiting calls, the call that came first goes first.
local turn_is_first = in_turn and (not place[1] or (tonumber(by_itself[2]) or 0) <= taken)

local turn_since = tonumber(by_itself[2]) or now
local since = math.max(now, taken + 1) -- later than the call that waits already
if in_turn == id then
  since = turn_since
elseif waits_since > 0 then
  since = math.min(now, waits_since)
end
-- Of the messages that run by themselves, the one that has waited longest takes the turn when it asks. Where the turn
-- is free, as after a start, those that have not asked since are not known.
local is_older = in_turn and in_turn ~= id and waits_since > 0 and since < turn_since
local is_first = in_turn == id and turn_is_first
if in_turn ~= id and (not in_turn or is_older) then -- it has waited for longer than the call that waits already
  is_first = turn_ms > 0 and waits_since > 0 and since <= taken
end

--- Reply with the call that holds the lock, or that waits and came first. A message that waits takes a free turn, or
-- that of a newer one.
local function held(by)
  local answer = reply("held", by)
  answer[9], answer[10] = string.format("%.0f", since), "0"
  local may_be_older = by == turn or redis.call("HGET", by, "took_free")
  answer[11] = other and "heir" or (may_be_older and "older" or "")
  if ARGV[14] == "1" and other then
    if in_turn == id then
      redis.call("DEL", turn)
    end
  elseif turn_ms > 0 and place[1] ~= id and (not in_turn or in_turn == id or is_older) then
    redis.call("PEXPIRE", turn, string.format("%.0f", turn_ms)) -- if this is forbidden, nothing is written
    if in_turn ~= id then
      redis.call("DEL", turn) -- drops the fields of a newer one
      redis.call("HSET", turn, "id", id, "state", "queued", "task", task, "args", args,
        "entry", entry, "since", string.format("%.0f", since))
    end
    redis.call("HSET", turn, "gen", ARGV[2])
    redis.call("PEXPIRE", turn, string.format("%.0f", turn_ms))
    answer[10] = string.format("%.0f", math.max(1, now - (tonumber(answer[4]) or now)))
  elseif turn_ms > 0 and place[1] == id then
    -- Between two tries a broker may delay the message. Then no worker renews the lock, and it is in no known queue.
    local ttl = math.max(turn_ms, redis.call("PTTL", behind))
    if place[5] then
      ttl = math.max(1, math.min(ttl, place[5] - now))
    end
    redis.call("PEXPIRE", behind, string.format("%.0f", ttl))
    redis.pcall("HSET", behind, "renewed", string.format("%.0f", now)) -- the server's memory may be full, as in renew
    redis.call("HDEL", behind, "worker")
  end
  return answer
end

-- A fence: the holder has started before. A payload: it stands for other calls.
local is_behind = state == "queued" and not record[6] and (record[10] or "") == ""
local overtakes = ARGV[13] == "1" and holder and holder ~= id and is_behind
if overtakes then
  holder, record[5] = false, false -- the rest is as with a free lock
end
if holder and holder ~= id then
  return held(lock)
end
if not holder and other and not is_first then
  return held(behind)
end
if not holder and in_turn and in_turn ~= id then
  -- Messages that run by themselves, and are sent again if they must wait, overtake the one that has the turn until it
  -- has waited for long.
  local may_not = turn_ms == 0 or (not is_older and now - turn_since > PATIENCE)
  if place[1] == id then
    may_not = turn_is_first
  end
  if may_not then
    return held(turn)
  end
end
if holder and held_gen > gen then
  return reply("stale")
end
local is_retry = holder and math.floor(held_gen) < math.floor(gen)
if is_retry and state == "running" then
  -- By the run that has sent us, perhaps without a promise of its lock; or its message was delivered again, and runs now.
  return reply("held")
end
if holder and math.floor(held_gen) == math.floor(gen) and state == "running" then
  return reply(held_gen == gen and held_nonce == nonce and "started" or "copy")
end

local bound, payload = record[5], record[10] or ""
-- If this is forbidden, nothing is written. If a later write is refused, the lock lasts as long as before.
local left = redis.call("PTTL", lock)
redis.call("PEXPIRE", lock, string.format("%.0f", left > 0 and left or lease))
if overtakes then
  redis.call("DEL", lock)
end
if not holder then
  redis.call("HSET", lock, "id", id, "task", task, "args", args, "entry", entry)
  if place[1] ~= id and waiting[1] ~= id then
    redis.call("HSET", lock, "took_free", "1")
  end
  if ARGV[12] ~= "" then
    redis.call("HSET", lock, "sent", ARGV[12])
  end
end
if not bound and expiry > 0 then
  bound = now + expiry
  redis.call("HSET", lock, "until", string.format("%.0f", bound))
end
if holder and held_gen < gen then
  -- The lower generation is queued, and no message of it is left: its run has sent ours.
  redis.call("ZADD", done, string.format("%.0f", now), id .. ":" .. record[2])
  redis.call("PEXPIRE", done, string.format("%.0f", math.max(done_ms, redis.call("PTTL", done))))
  payload = "" -- the new message has its own arguments
  redis.call("HSET", lock, "payload", payload)
end
-- Microseconds of the server's clock, so that the fence rises even if no record of the last run is left.
local fence = math.max(time[1] * 1000000 + time[2], (tonumber(record[6]) or 0) + 1)
local now_text, fence_text = string.format("%.0f", now), string.format("%.0f", fence)
redis.call("HSET", lock, "gen", ARGV[2], "state", "running", "nonce", nonce, "since", now_text, "fence", fence_text)
if record[7] or record[9] then
  redis.call("HDEL", lock, "next", "next_ttl", "worker", "renewed")
end
if waiting[1] == id and waiting[2] and waiting[2] ~= "" then
  payload = waiting[2]
  redis.call("HSET", lock, "payload", payload)
end
if waiting[1] == id and queued ~= behind then
  redis.call("DEL", queued)
end
if place[1] == id then
  redis.call("HSET", lock, "if_held", place[2] or "")
  redis.call("DEL", behind)
end
if in_turn == id then
  redis.call("DEL", turn)
end
if bound then
  lease = math.max(1, math.min(lease, bound - now))
end
redis.call("PEXPIRE", lock, string.format("%.0f", lease))
return {"started", id, "running", now_text, fence_text, lease, payload, holder and (record[11] or "") or entry}
