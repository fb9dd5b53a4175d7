--- unpark: put entries back that have come back to beat_schedule, with their past and what an operator has set.
--
-- KEYS[1...]  entries  for each row two hashes: the entry, and where it is kept
-- ARGV[1]     owner    the app that they come back to
-- ARGV[2]     rows     JSON, one text for each entry: the field since, which keeps beat from making up for what has
--                      passed; empty: none
--
-- returns  JSON, for each entry whether it was put back: it is not if there is an entry, or what is kept is another app's
--          (a repetition finds nothing that is kept and does nothing)

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
