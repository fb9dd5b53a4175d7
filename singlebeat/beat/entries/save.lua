--- save: store entries, each unless another program has changed the fields to be stored since we read them.
--
-- A repetition of the call, after its reply was lost, returns true again and writes nothing, even if a beat has claimed
-- the entry meanwhile, or others have stored it, or have deleted it and stored it anew, unless there were many changes
-- since then or none is recorded: a copy of the call may be late.
--
-- It uses bare, called, fenced, permitted and record: each change of a definition or a policy is recorded. A change of meta, since or the score is none.
--
-- KEYS[1]     lock      as in fenced
-- KEYS[2]     schedule  zset: members by the time of their next occurrence (s)
-- KEYS[3]     changes   stream: as in record
-- KEYS[4]     lost      string: what the server has lost, for operators; removed when a program adds an entry
-- KEYS[5]     pending   zset: keys of entries with an occurrence that is claimed and not confirmed, by next try (s)
-- KEYS[6...]  entries   hashes: definition, meta, policy, since, sent; written: ids of the last calls that wrote;
--                       pending, backfill and asked as in propose
-- ARGV[1]     token     of our term, as in fenced
-- ARGV[2]     actor     as in record
-- ARGV[3]     by        as in record
-- ARGV[4]     limit     as in record
-- ARGV[5]     action    as in record
-- ARGV[6]     note      as in record
-- ARGV[7]     id        of this call
-- ARGV[8]     wishes    JSON, one array for each entry:
--             member      of the entry in the schedule
--             name        of the entry
--             found       [definition, meta, policy, since, sent] as we read them, false for an absent field
--             fields      [definition, meta, policy, since, sent] to be stored; an empty string: remove the field;
--                         false or absent: leave the field, it may have changed
--             score       of the next occurrence, as a string; empty: leave it
--             unsent      [id, pending, backfill] of a removed entry that comes back: its claimed occurrence and the
--                         id of that, and its backfill, each empty if there is none; an existing entry gets none
--
-- returns  JSON, for each entry whether it was stored; null if another beat leads; an error if the server refuses a
--          command. After null or an error nothing was written

local schedule, pending, id = KEYS[2], KEYS[5], ARGV[7]
if fenced({KEYS[1]}, {ARGV[1]}) == 1 then
  return "null"
end
local refused = permitted({KEYS[6], KEYS[6], schedule, schedule, pending}, {"HSET", "HDEL", "ZADD", "ZREM", "ZADD"})
if refused then
  return refused
end

local names = {"definition", "meta", "policy", "since", "sent"}
-- Others may have removed what this call has stored, and its ids with it.
local was_stored = called({KEYS[3]}, {id})

local function give_back(entry, member, asked, occurrence, backfill)
  if occurrence ~= "" then
    redis.call("HSET", entry, "pending", occurrence, "asked", asked)
    redis.call("ZADD", pending, 0, member)
  end
  if backfill ~= "" then
    redis.call("HSET", entry, "backfill", backfill)
  end
end

local function save(entry, member, name, found, fields, score, unsent)
  local stored = redis.pcall("HMGET", entry, "definition", "meta", "policy", "since", "sent", "written")
  if stored.err then
    return false
  end
  local written = stored[6] or ""
  if string.find(" " .. written .. " ", " " .. id .. " ", 1, true) then
    return true  -- by this call: its reply was lost
  end
  if was_stored[name] and (stored[1] or ARGV[3] ~= "beat_schedule") then
    return true
  end
  for i in ipairs(names) do
    if fields[i] and stored[i] ~= found[i] then
      return false
    end
  end

  record({KEYS[3], entry}, {ARGV[2], ARGV[3], ARGV[4], name, ARGV[5], ARGV[6], stored[1] or "", stored[3] or "",
    fields[1], fields[3], id})
  for i, field in ipairs(names) do
    if fields[i] == "" and stored[i] then
      redis.call("HDEL", entry, field)
    elseif fields[i] and fields[i] ~= "" and fields[i] ~= stored[i] then
      redis.call("HSET", entry, field, fields[i])
    end
  end
  if not stored[1] and ARGV[3] ~= "beat_schedule" then
    redis.pcall("DEL", KEYS[4])  -- for operators: a user without this right stores entries all the same
  end
  if not stored[1] and unsent then
    give_back(entry, member, unpack(unsent))
  end
  -- More than are written while a client repeats a call, or a network holds a copy of it back.
  redis.call("HSET", entry, "written", string.sub(id .. " " .. written, 1, 1000))
  if score ~= "" then
    redis.call("ZADD", schedule, score, member)
    local other = bare({entry}, {name})
    if other ~= member then
      redis.call("ZREM", schedule, other)
    end
  end
  return true
end

local saved = {}
for i, wish in ipairs(cjson.decode(ARGV[8])) do
  saved[i] = save(KEYS[i + 5], unpack(wish))
end
return cjson.encode(saved)
