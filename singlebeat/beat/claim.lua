--- claim: take one occurrence of each of some entries, so that nobody else can, and move the entries to their next ones.
--
-- KEYS[1]     lock        string: the leader's token
-- KEYS[2]     schedule    zset: members by the time of their next occurrence (s)
-- KEYS[3]     pending     zset: members with an occurrence that is claimed and not confirmed, by the time to try it (s)
-- KEYS[4...]  entries     hashes: definition, meta, pending
-- ARGV[1]     token       of our term; empty: leadership is switched off
-- ARGV[2]     retry_at    when to try the occurrences again if they are not confirmed (s)
-- ARGV[3]     claims      JSON, one array for each entry:
--             member      of the entry in schedule and pending
--             score       that we have read and decided on
--             sha         SHA-1 of the definition that we have read
--             next        score of the next occurrence, as a text; negative: there is none
--             meta        for the entry; empty: leave it, which needs an empty occurrence, too
--             occurrence  JSON of the claimed occurrence; empty: only move on
--
-- returns  for each entry
--          claimed  done
--          fenced   another leads
--          moved    somebody has claimed, edited or deleted the entry meanwhile
--          pending  the last occurrence is not confirmed yet; it is in pending again, if it was lost from there
--          (nothing else was written for it but in the first case)

local lock, schedule, pending, token, retry_at = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
local fenced = token ~= "" and redis.call("GET", lock) ~= token

local next_scores, taken = {}, {}  -- score and member, in turns, for one ZADD of all entries

local function claim(entry, member, score, sha, next_score, meta, occurrence)
  if fenced then
    return "fenced"
  end
  if tonumber(redis.call("ZSCORE", schedule, member) or "nan") ~= score then
    return "moved"
  end
  local stored = redis.pcall("HMGET", entry, "definition", "pending")
  if not stored[1] or redis.sha1hex(stored[1]) ~= sha then
    return "moved"
  end
  if occurrence ~= "" and stored[2] then
    redis.call("ZADD", pending, "NX", retry_at, member)  -- else nobody would ever try it again, nor claim the next one
    return "pending"
  end

  if occurrence ~= "" then
    redis.call("HSET", entry, "pending", occurrence, "meta", meta)
    taken[#taken + 1], taken[#taken + 2] = retry_at, member
  elseif meta ~= "" then
    redis.call("HSET", entry, "meta", meta)
  end
  next_scores[#next_scores + 1], next_scores[#next_scores + 2] = next_score, member
  return "claimed"
end

local verdicts = {}
for i, wish in ipairs(cjson.decode(ARGV[3])) do
  verdicts[i] = claim(KEYS[i + 3], unpack(wish))
end
if #taken > 0 then
  redis.call("ZADD", pending, unpack(taken))
end
if #next_scores > 0 then
  redis.call("ZADD", schedule, unpack(next_scores))
end
return cjson.encode(verdicts)
