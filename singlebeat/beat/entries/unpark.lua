--- unpark: put back entries that have come back to beat_schedule, with their past and the settings of an operator.
--
-- An entry that an operator has stored again meanwhile stays as it is, and gets only the occurrence that is claimed and
-- not confirmed, unless it was proposed to it, as by a revert. Then the copy goes.
--
-- It uses fenced, permitted and record.
--
-- KEYS[1]     lock     as in fenced
-- KEYS[2]     changes  stream: as in record
-- KEYS[3]     pending  zset: keys of entries with an occurrence that is claimed and not confirmed, by next try (s)
-- KEYS[4...]  entries  for each row two hashes: the entry, and the copy that is kept of it
-- ARGV[1]     token    of our term, as in fenced
-- ARGV[2]     owner    the app to which they come back
-- ARGV[3]     actor    as in record
-- ARGV[4]     by       as in record
-- ARGV[5]     limit    as in record
-- ARGV[6]     rows     JSON, one array for each entry:
--             name     of the entry
--             since    the field since, so that beat does not make up for past occurrences; empty: none
--
-- returns  an error if the server refuses a command, and nothing was written
--          JSON: null if another beat leads, and nothing was written; else for each entry whether it was put back: not
--          if the entry exists, or if the copy is of other apps (a repetition finds no copy and does nothing)

local owner = ARGV[2]
if fenced({KEYS[1]}, {ARGV[1]}) == 1 then
  return "null"
end
local refused = permitted({KEYS[4], KEYS[4], KEYS[4], KEYS[3]}, {"HSET", "HDEL", "DEL", "ZADD"})
if refused then
  return refused
end

--- Give a stored entry the unsent occurrence of its copy; return whether the copy is of no use any more.
local function hand_over(entry, kept)
  local unsent, stored = redis.call("HGET", kept, "pending"), redis.pcall("HMGET", entry, "definition", "pending", "asked")
  if stored.err or not stored[1] then
    return false
  end
  local is_read, occurrence = pcall(cjson.decode, unsent or "")
  if not is_read or type(occurrence) ~= "table" then
    return true
  end
  if stored[2] then
    return false -- a later start gives it
  end
  local id = tostring(occurrence.id)
  if not string.find(" " .. (stored[3] or "") .. " ", " " .. id .. " ", 1, true) then
    redis.call("HSET", entry, "pending", unsent, "asked", string.sub(id .. " " .. (stored[3] or ""), 1, 2400))
    redis.call("ZADD", KEYS[3], 0, entry)
  end
  return true
end

local function unpark(entry, kept, name, since)
  local dropped_by = redis.pcall("HGET", kept, "dropped_by")
  if type(dropped_by) ~= "string" or not string.find("\n" .. dropped_by .. "\n", "\n" .. owner .. "\n", 1, true) then
    return false
  end
  if redis.call("EXISTS", entry) == 1 then
    if hand_over(entry, kept) then
      redis.call("DEL", kept)
    end
    return false
  end

  local fields, stored = redis.call("HGETALL", kept), redis.call("HMGET", kept, "definition", "policy")
  record({KEYS[2], entry}, {ARGV[3], ARGV[4], ARGV[5], name, "unpark", "", "", "", stored[1] or "", stored[2] or ""})
  for at = 1, #fields, 2 do
    redis.call("HSET", entry, fields[at], fields[at + 1])
  end
  redis.call("HDEL", entry, "dropped_by")
  if since ~= "" then
    redis.call("HSET", entry, "since", since)
  end
  if redis.call("HGET", entry, "pending") then
    redis.call("ZADD", KEYS[3], 0, entry)
  end
  redis.call("DEL", kept)
  return true
end

local replies = {}
for i, row in ipairs(cjson.decode(ARGV[6])) do
  replies[i] = unpark(KEYS[2 * i + 2], KEYS[2 * i + 3], unpack(row))
end
return cjson.encode(replies)
