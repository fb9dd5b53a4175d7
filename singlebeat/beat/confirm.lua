--- confirm: record what became of a claimed occurrence; it is pending no longer.
--
-- KEYS[1]  entry       hash: definition, meta, pending
-- KEYS[2]  pending     zset: members with an occurrence that is claimed and not confirmed
-- KEYS[3]  history     stream: one record per decision
-- ARGV[1]  member      of the entry in pending
-- ARGV[2]  occurrence  JSON of the occurrence, as it was claimed
-- ARGV[3]  meta        for the entry; empty: leave it
-- ARGV[4]  limit       records to keep; 0: keep none
-- ARGV[5...]  record   fields and values of the record
--
-- returns  1 recorded, 0 the occurrence was confirmed before, or its entry is gone

local entry, pending, history = KEYS[1], KEYS[2], KEYS[3]
local member, occurrence, meta, limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

if redis.call("HGET", entry, "pending") ~= occurrence then
  return 0
end

redis.call("HDEL", entry, "pending")
redis.call("ZREM", pending, member)
if meta ~= "" then
  redis.call("HSET", entry, "meta", meta)
end
if limit ~= "0" then
  redis.call("XADD", history, "MAXLEN", "~", limit, "*", unpack(ARGV, 5))
end
return 1
