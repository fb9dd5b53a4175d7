--- claim: take one occurrence of an entry, so that nobody else can, and move the entry to its next one.
--
-- KEYS[1]  lock        string: the leader's token
-- KEYS[2]  schedule    zset: members by the time of their next occurrence (s)
-- KEYS[3]  entry       hash: definition, meta, pending
-- KEYS[4]  pending     zset: members with an occurrence that is claimed and not confirmed, by the time to try it (s)
-- ARGV[1]  token       of our term; empty: leadership is switched off
-- ARGV[2]  member      of the entry in schedule and pending
-- ARGV[3]  score       that we have read and decided on
-- ARGV[4]  sha         SHA-1 of the definition that we have read
-- ARGV[5]  next        score of the next occurrence; negative: there is none
-- ARGV[6]  meta        for the entry; empty: leave it
-- ARGV[7]  occurrence  JSON of the claimed occurrence; empty: only move on
-- ARGV[8]  retry_at    when to try the occurrence again if it is not confirmed (s)
--
-- returns  claimed  done
--          fenced   another leads
--          moved    somebody has claimed, edited or deleted the entry meanwhile
--          pending  the last occurrence is not confirmed yet
--          (nothing was written but in the first case)

local lock, schedule, entry, pending = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, member, score, sha = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local next_score, meta, occurrence, retry_at = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

if token ~= "" and redis.call("GET", lock) ~= token then
  return "fenced"
end
if tonumber(redis.call("ZSCORE", schedule, member) or "nan") ~= score then
  return "moved"
end
local stored = redis.call("HMGET", entry, "definition", "pending")
if not stored[1] or redis.sha1hex(stored[1]) ~= sha then
  return "moved"
end
if occurrence ~= "" and stored[2] then
  return "pending"
end

if meta ~= "" then
  redis.call("HSET", entry, "meta", meta)
end
if occurrence ~= "" then
  redis.call("HSET", entry, "pending", occurrence)
  redis.call("ZADD", pending, retry_at, member)
end
redis.call("ZADD", schedule, next_score, member)
return "claimed"
