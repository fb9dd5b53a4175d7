--- claim: claim one occurrence of each of some entries, so that no other beat can, and move the entries to their next.
--
-- A repetition of the call, after its reply was lost, returns "claimed" again and writes nothing. It returns "moved"
-- for an entry that only moves on, with a new past, while leadership is switched off: another beat may have done this.
--
-- KEYS[1]     lock        string: the leader's token; where leadership is switched off: the zone of the schedule
-- KEYS[2]     schedule    zset: members by the time of their next occurrence (s)
-- KEYS[3]     pending     zset: keys of entries with an occurrence that is claimed and not confirmed, by next try (s)
-- KEYS[4]     pauses      hash: the pauses of many entries, records by selector
-- KEYS[5...]  entries     hashes: definition, meta, policy, since, pending
-- ARGV[1]     token       what lock must hold, else another beat leads, or decides in another zone; empty: any value
-- ARGV[2]     retry_at    when to retry the occurrences if they are not confirmed (s); no other call has the same value
-- ARGV[3]     claims      JSON, one array for each entry:
--             member      of the entry in schedule: its key, or its bare name
--             score       that we have read and decided on
--             sha         SHA-1 of the fields that we have decided on: all five, joined by NUL; an absent one is empty
--             next        score of the next occurrence, as a string; negative: there is none
--             meta        new value; empty: leave it, then occurrence must be empty, too
--             since       new value, written with meta; empty: the entry has none then
--             occurrence  JSON of the claimed occurrence; empty: only move on
-- ARGV[4]     found       JSON: the pauses that we have decided on, selector and record alternating
-- ARGV[5]     leads       1: we lead; 0: leadership is switched off, and other beats may claim at the same time
--
-- returns  for each entry
--          claimed  done; of an entry that only moves on, an unconfirmed occurrence is put back into pending, too, if it
--                   was missing there
--          fenced   another beat leads
--          moved    the entry has been claimed, confirmed, edited, paused or deleted since it was read, or pauses of
--                   many entries have changed
--          pending  the last occurrence is not confirmed yet; it is put back into pending if it was missing there
--          (only claimed writes anything else for the entry)
--          An error if the server refuses HDEL, without which confirm would fail, and a run be sent again and again, or
--          ZADD; then nothing was written

local lock, schedule, pending, token, retry_at = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
local leads = ARGV[5] == "1"
local fenced = token ~= "" and redis.call("GET", lock) ~= token

local function are_pauses_as_found()
  local found, stored, records = cjson.decode(ARGV[4]), redis.pcall("HGETALL", KEYS[4]), {}
  if #found ~= #stored then  -- there are none if the key is not a hash
    return false
  end
  for i = 1, #stored, 2 do
    records[stored[i]] = stored[i + 1]
  end
  for i = 1, #found, 2 do
    if records[found[i]] ~= found[i + 1] then
      return false
    end
  end
  return true
end

if #KEYS > 4 then
  -- A field, and a place, that no entry has.
  for _, tried in ipairs({redis.pcall("HDEL", KEYS[5], ""), redis.pcall("ZADD", pending, "XX", 0, "")}) do
    if type(tried) == "table" and not string.find(tried.err, "WRONGTYPE", 1, true) then
      return tried
    end
  end
end

local is_paused_otherwise = not are_pauses_as_found()
local next_scores, taken = {}, {}  -- score and member, alternating, for one ZADD of all entries

local function score_of(zset, member)
  return tonumber(redis.call("ZSCORE", zset, member) or "nan")
end

local function claim(entry, member, score, sha, next_score, meta, since, occurrence)
  if fenced then
    return "fenced"
  end
  local f = redis.pcall("HMGET", entry, "definition", "meta", "policy", "since", "pending")
  if not f[1] then
    return "moved"
  end
  for i = 1, 5 do
    f[i] = f[i] or ""
  end

  local at = score_of(schedule, member)
  local is_ours = f[5] == occurrence and score_of(pending, entry) == tonumber(retry_at)
  if occurrence == "" then
    is_ours = at == tonumber(next_score) and (meta == "" or (leads and f[2] == meta and f[4] == since))
  end
  if is_ours then
    return "claimed"  -- by this call: its reply was lost
  end
  if at == score and occurrence ~= "" and f[5] ~= "" then
    redis.call("ZADD", pending, "NX", retry_at, entry)  -- else it would never be retried, nor the next one claimed
    return "pending"
  end
  if at ~= score or redis.sha1hex(table.concat(f, "\0")) ~= sha then
    return "moved"
  end
  if is_paused_otherwise then
    return "moved"
  end

  if occurrence ~= "" then
    redis.call("HSET", entry, "pending", occurrence, "meta", meta)
    taken[#taken + 1], taken[#taken + 2] = retry_at, entry
  elseif meta ~= "" then
    redis.call("HSET", entry, "meta", meta)
  end
  if occurrence == "" and f[5] ~= "" then  -- another program may have put the entry back
    redis.call("ZADD", pending, "NX", retry_at, entry)
  end
  if meta ~= "" and since ~= "" then
    redis.call("HSET", entry, "since", since)
  elseif meta ~= "" and f[4] ~= "" then
    redis.call("HDEL", entry, "since")
  end
  next_scores[#next_scores + 1], next_scores[#next_scores + 2] = next_score, member
  return "claimed"
end

local verdicts = {}
for i, wish in ipairs(cjson.decode(ARGV[3])) do
  verdicts[i] = claim(KEYS[i + 4], unpack(wish))
end
if #taken > 0 then
  redis.call("ZADD", pending, unpack(taken))
end
if #next_scores > 0 then
  redis.call("ZADD", schedule, unpack(next_scores))
end
return cjson.encode(verdicts)
