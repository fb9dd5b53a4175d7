--- retake: take up occurrences that were claimed and not confirmed, so that no other beat does at the same time.
--
-- A repetition of the call, after its reply was lost, says the same and writes nothing.
--
-- KEYS[1]  lock      string: the leader's token
-- KEYS[2]  pending   zset: members with an occurrence that is claimed and not confirmed, by the time to try it (s)
-- ARGV[1]  token     of our term; empty: leadership is switched off
-- ARGV[2]  retry_at  when to try them again if they are not confirmed (s); no other call has the same
-- ARGV[3]  wishes    JSON, one array for each: [member of the entry in pending, score that we have read]
--
-- returns  JSON, for each whether it is ours to try: else another leads or has taken it up

local lock, pending, token, retry_at = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local fenced = token ~= "" and redis.call("GET", lock) ~= token

local function retake(member, score)
  if fenced then
    return false
  end
  local at = tonumber(redis.call("ZSCORE", pending, member) or "nan")
  if at == tonumber(retry_at) then
    return true  -- by this very call: its reply was lost
  end
  if at ~= score then
    return false
  end
  redis.call("ZADD", pending, retry_at, member)
  return true
end

local taken = {}
for i, wish in ipairs(cjson.decode(ARGV[3])) do
  taken[i] = retake(unpack(wish))
end
return cjson.encode(taken)
