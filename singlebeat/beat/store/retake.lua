--- retake: retake occurrences that were claimed and not confirmed, so that no other beat sends them at the same time.
--
-- A repetition of the call, after its reply was lost, returns the same and writes nothing.
--
-- KEYS[1]  lock      string: the leader's token
-- KEYS[2]  pending   zset: members with an occurrence that is claimed and not confirmed, by time of the next try (s)
-- ARGV[1]  token     of our term; empty: leadership is switched off
-- ARGV[2]  retry_at  when to retry them if they are not confirmed (s); no other call has the same value
-- ARGV[3]  wishes    JSON, one array for each: [member of the entry in pending, score that we have read, key of the
--                    entry, which replaces a bare name in pending]
--
-- returns  JSON, for each whether we may send it; if not, another beat leads or has retaken it

local lock, pending, token, retry_at = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local fenced = token ~= "" and redis.call("GET", lock) ~= token

local function retake(member, score, entry)
  if fenced then
    return false
  end
  if tonumber(redis.call("ZSCORE", pending, entry) or "nan") == tonumber(retry_at) then
    return true  -- by this call: its reply was lost
  end
  if tonumber(redis.call("ZSCORE", pending, member) or "nan") ~= score then
    return false
  end
  if member ~= entry then
    redis.call("ZREM", pending, member)
  end
  redis.call("ZADD", pending, retry_at, entry)
  return true
end

local taken = {}
for i, wish in ipairs(cjson.decode(ARGV[3])) do
  taken[i] = retake(unpack(wish))
end
return cjson.encode(taken)
