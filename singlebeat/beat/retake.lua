--- retake: take up an occurrence that was claimed and not confirmed, so that nobody else does at the same time.
--
-- KEYS[1]  lock      string: the leader's token
-- KEYS[2]  pending   zset: members with an occurrence that is claimed and not confirmed, by the time to try it (s)
-- ARGV[1]  token     of our term; empty: leadership is switched off
-- ARGV[2]  member    of the entry in pending
-- ARGV[3]  score     that we have read
-- ARGV[4]  retry_at  when to try it again if it is not confirmed (s)
--
-- returns  1 it is ours to try, 0 another leads or has taken it up

local lock, pending = KEYS[1], KEYS[2]
local token, member, score, retry_at = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

if token ~= "" and redis.call("GET", lock) ~= token then
  return 0
end
if tonumber(redis.call("ZSCORE", pending, member) or "nan") ~= score then
  return 0
end
redis.call("ZADD", pending, retry_at, member)
return 1
