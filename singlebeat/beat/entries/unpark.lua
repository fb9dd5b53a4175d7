--- unpark: put back entries that have come back to beat_schedule, with their past and the settings of an operator.
--
-- KEYS[1...]  entries  for each row two hashes: the entry, and the copy that is kept of it
-- ARGV[1]     owner    the app to which they come back
-- ARGV[2]     rows     JSON, one string for each entry: the field since, so that beat does not make up for past
--                      occurrences; empty: none
--
-- returns  JSON, for each entry whether it was put back: not if the entry exists, or if the copy belongs to another app
--          (a repetition finds no copy and does nothing)

local owner = ARGV[1]

local function unpark(entry, kept, since)
  if redis.call("EXISTS", entry) == 1 or redis.pcall("HGET", kept, "owner") ~= owner then
    return false
  end

  local fields = redis.call("HGETALL", kept)
  for at = 1, #fields, 2 do
    redis.call("HSET", entry, fields[at], fields[at + 1])
  end
  redis.call("HDEL", entry, "owner")
  if since ~= "" then
    redis.call("HSET", entry, "since", since)
  end
  redis.call("DEL", kept)
  return true
end

local replies = {}
for i, since in ipairs(cjson.decode(ARGV[2])) do
  replies[i] = unpark(KEYS[2 * i - 1], KEYS[2 * i], since)
end
return cjson.encode(replies)
