--- propose: give an entry an occurrence that its schedule does not ask for; the leader sends it in its next tick.
--
-- It uses permitted. A repetition of the call, after its reply was lost, returns "proposed" again and writes nothing, even if the
-- occurrence was sent meanwhile. If the entry was removed and stored anew since then, the repetition returns "anew", and
-- so does a copy of the call that the network has held back, unless none of these changes is recorded.
--
-- KEYS[1]  entry       hash: definition, pending, backfill, asked: ids of the last occurrences that were proposed
-- KEYS[2]  pending     zset: members with an occurrence that is claimed and not confirmed, by time of the next try (s)
-- KEYS[3]  changes     stream: one record per change
-- ARGV[1]  member      of the entry in pending
-- ARGV[2]  id          of the occurrence; empty: propose none, only end the backfill
-- ARGV[3]  occurrence  JSON of it
-- ARGV[4]  found       the field backfill as it was read; empty: absent
-- ARGV[5]  at          the field backfill from now on; empty: the backfill ends; the same as found: leave the field
-- ARGV[6]  name        of the entry
-- ARGV[7]  last        id of the last change that the caller knows; 0-0: none
--
-- returns  proposed  done
--          pending   the last occurrence is not confirmed yet; it is put back into pending if it was missing there
--          moved     another call has continued the backfill
--          missing   the entry does not exist
--          anew      the entry was removed and stored anew since the last change that the caller knows
--          (only proposed writes anything else)
--          an error if the server refuses a command, and nothing was written

local entry, pending, member, id, occurrence, found, at = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local stored = redis.pcall("HMGET", entry, "definition", "pending", "backfill", "asked")
if not stored[1] then
  return "missing"
end
local asked = " " .. (stored[4] or "")
local is_asked = string.find(asked .. " ", " " .. id .. " ", 1, true)
if (id ~= "" and is_asked) or (id == "" and (stored[3] or "") == at) then
  return "proposed"  -- by this call: its reply was lost
end
if id ~= "" and stored[2] then
  redis.call("ZADD", pending, "NX", 0, member)
  return "pending"
end
if at ~= found and (stored[3] or "") ~= found then
  return "moved"
end

local MOST_READ = 100 -- changes that are new to the caller
local changes = redis.pcall("XREVRANGE", KEYS[3], "+", "(" .. ARGV[7], "COUNT", MOST_READ)
for _, record in ipairs(changes.err and {} or changes) do
  local fields = record[2]
  local action = fields[8] -- as record writes it
  if fields[2] == ARGV[6] and (action == "delete" or action == "park") then
    return "anew"
  end
end

local refused = permitted({entry, entry, pending}, {"HSET", "HDEL", "ZADD"})
if refused then
  return refused
end
if id ~= "" then
  -- More than are proposed while a client repeats a call.
  redis.call("HSET", entry, "pending", occurrence, "asked", string.sub(id .. asked, 1, 2400))
  redis.call("ZADD", pending, 0, member)
end
if at == "" and found ~= "" then
  redis.call("HDEL", entry, "backfill")
elseif at ~= found then
  redis.call("HSET", entry, "backfill", at)
end
return "proposed"
