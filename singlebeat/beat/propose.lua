--- propose: give an entry an occurrence that its schedule does not ask for; the leader sends it in its next tick.
--
-- KEYS[1]  entry       hash: definition, pending, backfill
-- KEYS[2]  pending     zset: members with an occurrence that is claimed and not confirmed, by the time to try it (s)
-- ARGV[1]  member      of the entry in pending
-- ARGV[2]  occurrence  JSON of it
-- ARGV[3]  found       how far a backfill has come, as it was read; empty: there was none
-- ARGV[4]  at          how far it comes with this occurrence; empty: it ends; the same as found: it is none of our business
--
-- returns  proposed  done, now or by an earlier call that was not heard
--          pending   the last occurrence is not confirmed yet
--          moved     another call goes on with the backfill
--          missing   there is no such entry
--          (nothing was written but in the first case)

local entry, pending, member, occurrence, found, at = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local stored = redis.pcall("HMGET", entry, "definition", "pending", "backfill")
if not stored[1] then
  return "missing"
end
if stored[2] then
  return stored[2] == occurrence and "proposed" or "pending"
end
if at ~= found and (stored[3] or "") ~= found then
  return "moved"
end

redis.call("HSET", entry, "pending", occurrence)
redis.call("ZADD", pending, 0, member)
if at == "" and found ~= "" then
  redis.call("HDEL", entry, "backfill")
elseif at ~= found then
  redis.call("HSET", entry, "backfill", at)
end
return "proposed"
