--- park: remove entries that have left beat_schedule from the schedule, and keep copies of them: they may come back.
--
-- It uses bare, fenced, permitted and record.
--
-- KEYS[1]     lock        as in fenced
-- KEYS[2]     schedule    zset: members by the time of their next occurrence (s)
-- KEYS[3]     pending     zset: members with an occurrence that is claimed and not confirmed
-- KEYS[4]     quarantine  hash: members that are quarantined
-- KEYS[5]     statics     set: names of the entries that come from beat_schedule
-- KEYS[6]     owners      hash: the apps of each of these names
-- KEYS[7]     changes     stream: as in record
-- KEYS[8...]  entries     for each row two hashes: the entry, and the copy that is kept of it
-- ARGV[1]     token       of our term, as in fenced
-- ARGV[2]     owner       the app that the entries have left
-- ARGV[3]     ttl         how long the copies are kept (ms)
-- ARGV[4]     actor       as in record
-- ARGV[5]     by          as in record
-- ARGV[6]     limit       as in record
-- ARGV[7]     rows        JSON, one array for each entry:
--             name        in statics and owners
--             found       its owners as they were read, an empty string for none
--             left        its owners without that app; empty: no owner is left, so the entry is parked. Else the entry
--                         remembers the app in its field dropped_by: when it is parked, that app, too, can have it back
--             is_entry    false: its key is a key of the schedule itself, and is not touched
--
-- returns  an error if the server refuses a command, and nothing was written
--          JSON: null if another beat leads, and nothing was written; else for each entry
--          parked  the entry is out of the schedule
--          unsent  the same, and an occurrence of it is claimed and not confirmed, which stays with the copy
--          left    the entry stays, with the owners that are left
--          moved   its owners have changed meanwhile: nothing was written for it
--          (a repetition finds other owners and returns moved, or parked if there were no owners before)

local schedule, pending, quarantine, statics, owners = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local owner, ttl = ARGV[2], ARGV[3]
if fenced({KEYS[1]}, {ARGV[1]}) == 1 then
  return "null"
end
local refused = permitted({owners, owners, statics, schedule, KEYS[8], KEYS[8]},
  {"HSET", "HDEL", "SREM", "ZREM", "DEL", "PEXPIRE"})
if refused then
  return refused
end

--- Return the apps that have dropped an entry, one in each line, with ours.
local function dropped_by(entry)
  local before = redis.call("HGET", entry, "dropped_by")
  if not before then
    return owner
  end
  local is_known = string.find("\n" .. before .. "\n", "\n" .. owner .. "\n", 1, true)
  return is_known and before or before .. "\n" .. owner
end

local function park(entry, kept, name, found, left, is_entry)
  if (redis.call("HGET", owners, name) or "") ~= found then
    return "moved"
  end
  local fields = is_entry and redis.pcall("HGETALL", entry) or {}  -- empty if the key is not a hash

  if left ~= "" then
    redis.call("HSET", owners, name, left)
    if #fields > 0 then
      redis.call("HSET", entry, "dropped_by", dropped_by(entry))
    end
    return "left"
  end
  if #fields > 0 then
    local stored = redis.call("HMGET", entry, "definition", "policy")
    record({KEYS[7], entry}, {ARGV[4], ARGV[5], ARGV[6], name, "park", "", stored[1] or "", stored[2] or "", "", ""})
  end
  redis.call("SREM", statics, name)
  redis.call("HDEL", owners, name)
  for _, member in ipairs({entry, bare({entry}, {name})}) do
    redis.call("ZREM", schedule, member)
    redis.call("ZREM", pending, member)
    redis.call("HDEL", quarantine, member)
  end
  if #fields > 0 then  -- copied, because a Redis user with few rights may not use RENAME
    redis.call("DEL", kept, entry)
    for at = 1, #fields, 2 do
      redis.call("HSET", kept, fields[at], fields[at + 1])
    end
    redis.call("HSET", kept, "dropped_by", dropped_by(kept))
    redis.call("HDEL", kept, "recorded")
    redis.call("PEXPIRE", kept, ttl)
    if redis.call("HGET", kept, "pending") then
      return "unsent"
    end
  end
  return "parked"
end

local replies = {}
for i, row in ipairs(cjson.decode(ARGV[7])) do
  replies[i] = park(KEYS[2 * i + 6], KEYS[2 * i + 7], unpack(row))
end
return cjson.encode(replies)
