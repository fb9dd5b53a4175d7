--- park: remove entries that have left beat_schedule from the schedule, and keep copies of them: they may come back.
--
-- It uses record.
--
-- KEYS[1]     schedule    zset: members by the time of their next occurrence (s)
-- KEYS[2]     pending     zset: members with an occurrence that is claimed and not confirmed
-- KEYS[3]     quarantine  hash: members that are quarantined
-- KEYS[4]     statics     set: names of the entries that come from beat_schedule
-- KEYS[5]     owners      hash: the apps of each of these names
-- KEYS[6]     changes     stream: as in record
-- KEYS[7...]  entries     for each row two hashes: the entry, and the copy that is kept of it
-- ARGV[1]     owner       the app that the entries have left
-- ARGV[2]     ttl         how long the copies are kept (ms)
-- ARGV[3]     actor       as in record
-- ARGV[4]     by          as in record
-- ARGV[5]     limit       as in record
-- ARGV[6]     rows        JSON, one array for each entry:
--             name        in statics and owners
--             found       its owners as they were read, an empty string for none
--             left        its owners without that app; empty: no owner is left, so the entry is parked
--             is_entry    false: its key is a key of the schedule itself, and is not touched
--
-- returns  JSON, for each entry
--          parked  the entry is out of the schedule
--          left    the entry stays, with the owners that are left
--          moved   its owners have changed meanwhile: nothing was written for it
--          (a repetition finds other owners and returns moved, or parked if there were no owners before)

local schedule, pending, quarantine, statics, owners = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local owner, ttl = ARGV[1], ARGV[2]

local function park(entry, kept, name, found, left, is_entry)
  if (redis.call("HGET", owners, name) or "") ~= found then
    return "moved"
  end
  local fields = is_entry and redis.pcall("HGETALL", entry) or {}  -- empty if the key is not a hash

  if left ~= "" then
    redis.call("HSET", owners, name, left)
    return "left"
  end
  if #fields > 0 then
    local stored = redis.call("HMGET", entry, "definition", "policy")
    record({KEYS[6], entry}, {ARGV[3], ARGV[4], ARGV[5], name, "park", "", stored[1] or "", stored[2] or "", "", ""})
  end
  redis.call("SREM", statics, name)
  redis.call("HDEL", owners, name)
  for _, member in ipairs({entry, name}) do
    redis.call("ZREM", schedule, member)
    redis.call("ZREM", pending, member)
    redis.call("HDEL", quarantine, member)
  end
  if #fields > 0 then  -- copied, because a Redis user with few rights may not use RENAME
    redis.call("DEL", kept, entry)
    for at = 1, #fields, 2 do
      redis.call("HSET", kept, fields[at], fields[at + 1])
    end
    redis.call("HSET", kept, "owner", owner)
    redis.call("HDEL", kept, "pending", "backfill", "recorded")
    redis.call("PEXPIRE", kept, ttl)
  end
  return "parked"
end

local replies = {}
for i, row in ipairs(cjson.decode(ARGV[6])) do
  replies[i] = park(KEYS[2 * i + 5], KEYS[2 * i + 6], unpack(row))
end
return cjson.encode(replies)
