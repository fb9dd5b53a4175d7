--- acquire: acquire the locks of calls that are about to be sent, or return their holders.
--
-- Two calls can wait behind a lock: a call that others may join or evict, and a call that runs by itself, which begin
-- has put there. While a call waits, it stands for its duplicates, even if the lock is free for the moment: no newer
-- call overtakes it. Of the two calls, the call that came first goes first.
--
-- A queued call that another one waits for, and that no call may join, gives its place to a call that would; it goes
-- first by itself.
--
-- KEYS[1...]  four for each call:
--             lock       hash: id, gen, state, nonce, fence, task, args, entry, since (ms), until (ms), payload, if_held
--             done       zset: "id:generation" of runs that ended under this lock recently, by time (ms), also with
--                        ":unsent" behind it, as in finish; and "id:replaced" of calls that were evicted before they
--                        started, by the end (ms) of their wait
--             behind     hash, as lock: the call that waits for the end of the holder
--             turn       hash, as lock: the call that waits for the end of the holder, and runs by itself
--             (if_held, in lock and behind: that of their call; a call with an empty if_held keeps its own arguments;
--             uncut (ms): time until which the message may wait, if until is earlier; taken (ms), in behind: time since
--             which this call, or a call that it evicted, has had the place; renewed (ms) and sent: as in renew)
-- ARGV[1]  again      1: refuse ids that have ended: they were sent before, or this request was held back, as by the network;
--                     0: users may have given the ids again
-- ARGV[2]  deadline   the server's time (ms) after which no caller waits for the reply; 0: none
-- ARGV[3]  calls      JSON, one array for each call:
--          id         task id of the call; the same id may ask again (a repeated publish)
--          gen        generation of its message: higher than 0 if it replaces another task
--          ttl        ms that its message may wait; an evicted call is remembered for as long, or for its own wait if
--                     that is longer
--          expiry     ms until the lock ends in any case, 0 for no bound; from the start on if other calls join it
--          task       name, for people
--          args       arguments, for people
--          payload    arguments for the run of a call that stands for this call; empty: that run has the same
--          if_held    what to do if another id holds the lock: "join" gives the payload to a queued call, or else waits
--                     behind the run; "replace" evicts queued calls, and waits behind the run, and so does
--                     "replace_alone", which keeps its own arguments; empty: nothing
--          entry      name of the schedule's entry that sends the call, for people; empty: a program sends it
--          only       the one verdict, "acquired" or "waiting", with which the call may take its place, or another word
--                     if it may take none; empty: both
--          note       a note of the sender, for the field "sent" of its lock; empty: none
--          state      of its lock: "queued", for its message; "timed", if only time, or an unlock, ends it
--
-- returns  JSON, one array for each call: [verdict, id of the holder, state, since (ms; 0: not known, because the
--          clock was set back), fence, ttl (ms), payload, entry]
--          acquired  the lock is queued or timed under our id
--          waiting   our id waits in the place behind the holder
--          (both write nothing if the call may take its place only with the other one)
--          running   our id holds the lock and has started: do not send again
--          done      our id ended under this lock: do not send again; another id may hold the lock now
--          held      another id holds the lock or waits for it; nothing was written but the payload. Or our id runs in a
--                    lower generation, which our call replaces; nothing was written
--          unusable  a key has another type or holds other data, or a field that must be a number is none; the second
--                    value is the reason; nothing was written
--          late      the deadline has passed; the fourth value is the server's time; nothing was written
--
-- Uses numbers, wrong_field, no_lock and shorten. A repetition by the same id gives the same reply, and writes nothing
-- new. Of locks that would last longer than they should, because the server's clock was set back, each call shortens the
-- time.

local again, deadline = ARGV[1] == "1", tonumber(ARGV[2])
local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_text = string.format("%.0f", now)

local function reply(verdict, lock, id)
  local r = redis.call("HMGET", lock, "id", "state", "since", "fence", "entry")
  local since = numbers(nil, {r[3]}) and (tonumber(r[3]) or 0) <= now + 1000 and r[3] -- a turn may be a moment ahead
  local fence = numbers(nil, {r[4]}) and r[4]
  return {verdict, r[1] or id, r[2] or "", since or "0", fence or "0", redis.call("PTTL", lock), "", r[5] or ""}
end

--- Evict a queued call from a lock or from the place behind the lock; the evicted call never starts.
local function replace(lock, done, holder, ttl)
  local waits = math.max(redis.call("PTTL", lock), ttl)
  redis.call("DEL", lock)
  redis.call("ZADD", done, string.format("%.0f", now + waits), holder .. ":replaced")
  redis.call("PEXPIRE", done, string.format("%.0f", math.max(waits, redis.call("PTTL", done))))
end

--- Write the record of a free lock, or leave the record of the same id; return the lifetime of the lock (ms).
local function hold(lock, is_ours, bound, id, gen, ttl, expiry, task, args, if_held, entry, note, state)
  if not is_ours then
    redis.call("PEXPIRE", lock, 1) -- if this is forbidden, nothing is written: a lock without an end would stay
    redis.call("HSET", lock, "id", id, "gen", gen, "state", state, "nonce", "",
      "task", task, "args", args, "entry", entry, "since", now_text, "payload", "", "if_held", if_held)
    if expiry > 0 then
      bound = now + expiry
      redis.call("HSET", lock, "until", string.format("%.0f", bound))
    end
  end
  if note ~= "" then
    redis.call("HSET", lock, "sent", note)
  end
  if bound then
    redis.call("HSET", lock, "uncut", string.format("%.0f", now + ttl))
    ttl = math.max(1, math.min(ttl, bound - now))
  end
  redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
  return ttl
end

--- Forget the ends of an id from a generation on, because a new call has the id.
local function forget(done, id, gen)
  for _, member in ipairs(redis.call("ZRANGE", done, 0, -1)) do
    local what = string.sub(member, 1, #id + 1) == id .. ":" and string.gsub(string.sub(member, #id + 2), ":unsent$", "")
    if what == "replaced" or (what and (tonumber(what) or -1) >= tonumber(gen)) then
      redis.call("ZREM", done, member)
    end
  end
end

local function acquire(lock, done, behind, turn, id, gen, ttl, expiry, task, args, payload, if_held, entry, only, note,
    new_state)
  if deadline > 0 and now > deadline then
    return {"late", "", "", now_text, "0", 0, ""}
  end
  local record = redis.pcall("HMGET", lock, "id", "state", "until", "if_held", "since", "renewed", "uncut", "gen")
  local ended = redis.pcall("ZMSCORE", done, id .. ":" .. gen, id .. ":replaced", id .. ":" .. gen .. ":unsent")
  local next_record = redis.pcall("HMGET", behind, "id", "until", "if_held", "taken", "since", "uncut")
  local by_itself = redis.pcall("HMGET", turn, "id", "since")
  local err = record.err or ended.err or next_record.err or by_itself.err
  if err and not string.find(err, "WRONGTYPE", 1, true) then
    return redis.error_reply(err)
  elseif err then
    return {"unusable", err, "", "0", "0", 0, ""}
  end
  local wrong = wrong_field({"", "until", "uncut"}, {record[3], record[7]})
    or wrong_field({behind .. ": ", "until", "taken", "uncut"}, {next_record[2], next_record[4], next_record[6]})
    or no_lock({lock, behind, turn}, {record[1], next_record[1], by_itself[1]})
  if wrong then
    return {"unusable", wrong, "", "0", "0", 0, ""}
  end
  local has_ended = ended[1] or ended[2] or ended[3]
  if again and has_ended then
    return reply("done", lock, id)
  end
  local holder, state, bound, waits = record[1], record[2], record[3], next_record[1]
  local taken = next_record[4] -- a call that evicts the waiting call takes this time over

  shorten({lock}, {now, state, record[5], record[6]})
  shorten({behind}, {now, "queued", next_record[5]})
  shorten({turn}, {now, "queued", by_itself[2]})

  local replaces = if_held == "replace" or if_held == "replace_alone"
  local in_turn = by_itself[1] ~= id and by_itself[1]
  local leaves_place = waits == id and holder ~= id
  if leaves_place and (not replaces or in_turn or (holder and state ~= "queued")) then
    hold(behind, true, next_record[2], id, gen, ttl, expiry, task, args, if_held, entry, note, new_state)
    redis.call("HSET", behind, "if_held", if_held)
    return reply("waiting", lock, id)
  elseif leaves_place then
    waits = false
  end
  local is_held = (holder and holder ~= id) or ((waits or in_turn) and not holder)
  if is_held and if_held == "" then
    return reply("held", holder and lock or (waits and behind) or turn, id)
  end
  if is_held and if_held == "join" then
    local stands_for_us = waits and behind or (state == "queued" and lock)
    local asked_for = waits and next_record[3] or record[4]
    local is_joinable = asked_for and asked_for ~= "" and asked_for ~= "replace_alone"
    if stands_for_us and (is_joinable or payload == "") then
      redis.call("HSET", stands_for_us, "payload", payload)
      if payload ~= "" then -- the new arguments last until it starts: its expiry counts from then on
        local uncut = record[7]
        if waits then
          uncut = next_record[6]
        end
        if uncut then
          redis.call("HDEL", stands_for_us, "until", "uncut")
          ttl = math.max(uncut - now, redis.call("PTTL", stands_for_us))
          redis.call("PEXPIRE", stands_for_us, string.format("%.0f", ttl))
        end
      end
      return reply("held", stands_for_us, id)
    end
  end
  local evicts = is_held and replaces
  local evicts_holder = evicts and holder and state == "queued"
  if evicts then
    is_held = (holder and not evicts_holder) or in_turn
  end
  if not is_held and holder and state == "running" then
    local running = tonumber(record[8])  -- another program may have spoilt it
    return reply(running and running < tonumber(gen) and "held" or "running", lock, id)
  end

  local verdict = is_held and "waiting" or "acquired"
  if only ~= "" and only ~= verdict then
    return reply(verdict, lock, id)
  end

  if evicts and waits then
    replace(behind, done, waits, ttl)
  end
  if evicts_holder then
    replace(lock, done, holder, ttl)
    holder, bound = false, false
  end
  if leaves_place then
    redis.call("DEL", behind)
  end
  if has_ended and (is_held or not holder) then
    forget(done, id, gen)
  end
  if by_itself[1] == id then -- a worker has received its message before its sender got here
    redis.call("DEL", turn)
  end
  if is_held and waits and not evicts and next_record[3] == "replace_alone" and not by_itself[1] then
    -- That call, which came first, waits by itself from now on, as others do that another call waits for.
    local first = redis.call("HMGET", behind, "gen", "task", "args", "entry")
    redis.call("HSET", turn, "id", waits, "gen", first[1] or "0", "state", "queued", "task", first[2] or "",
      "args", first[3] or "", "entry", first[4] or "", "since", taken or next_record[5] or now_text)
    redis.call("PEXPIRE", turn, math.max(1, redis.call("PTTL", behind)))
    taken = false
  end
  if is_held then
    redis.call("DEL", behind) -- drops the fields of a waiting call with an empty if_held
    hold(behind, false, false, id, gen, ttl, expiry, task, args, if_held, entry, note, new_state)
    redis.call("HSET", behind, "taken", taken or now_text)
    return reply("waiting", lock, id)
  end
  ttl = hold(lock, holder, bound, id, gen, ttl, expiry, task, args, if_held, entry, note, new_state)
  return holder and reply("acquired", lock, id) or {"acquired", id, new_state, now_text, "0", ttl, "", entry}
end

local replies = {}
for i, call in ipairs(cjson.decode(ARGV[3])) do
  replies[i] = acquire(KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i], unpack(call))
  if replies[i].err then
    return replies[i]
  end
end
return cjson.encode(replies)
