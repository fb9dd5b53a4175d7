--- save: store entries, each unless another program has changed the fields to be stored since we read them.
--
-- A repetition of the call, after its reply was lost, returns true again, even if a beat has claimed the entry
-- meanwhile, unless the entry is new. If definition and policy were to stay the same, it may return false: read the
-- entry again.
--
-- It uses record: each change of a definition or a policy is recorded. A change of meta, since or the score is none.
--
-- KEYS[1]     schedule  zset: members by the time of their next occurrence (s)
-- KEYS[2]     changes   stream: as in record
-- KEYS[3...]  entries   hashes: definition, meta, policy, since
-- ARGV[1]     actor     as in record
-- ARGV[2]     by        as in record
-- ARGV[3]     limit     as in record
-- ARGV[4]     action    as in record
-- ARGV[5]     note      as in record
-- ARGV[6]     wishes    JSON, one array for each entry:
--             member      of the entry in the schedule
--             name        of the entry
--             found       [definition, meta, policy, since] as we read them, false for an absent field
--             fields      [definition, meta, policy, since] to be stored; an empty string: remove the field;
--                         false: leave the field, it may have changed
--             score       of the next occurrence, as a string; empty: leave it
--
-- returns  JSON, for each entry whether it was stored; an error if the server refuses to record a change: then nothing
--          was written

local schedule = KEYS[1]

local names = {"definition", "meta", "policy", "since"}

local function save(entry, member, name, found, fields, score)
  local stored = redis.pcall("HMGET", entry, unpack(names))
  if stored.err then
    return false
  end
  local function are(definition, policy)
    return (stored[1] or "") == definition and (stored[3] or "") == policy
  end
  local is_new = not found[1]
  if are(fields[1], fields[3]) and not are(found[1] or "", found[3] or "") and (not is_new or stored[2] == fields[2]) then
    return true  -- by this call: its reply was lost; two equal new entries differ in their pasts
  end
  for i in ipairs(names) do
    if fields[i] and stored[i] ~= found[i] then
      return false
    end
  end

  record({KEYS[2], entry}, {ARGV[1], ARGV[2], ARGV[3], name, ARGV[4], ARGV[5], stored[1] or "", stored[3] or "",
    fields[1], fields[3]})
  for i, field in ipairs(names) do
    if fields[i] == "" and stored[i] then
      redis.call("HDEL", entry, field)
    elseif fields[i] and fields[i] ~= "" and fields[i] ~= stored[i] then
      redis.call("HSET", entry, field, fields[i])
    end
  end
  if score ~= "" then
    redis.call("ZADD", schedule, score, member)
  end
  return true
end

local saved = {}
for i, wish in ipairs(cjson.decode(ARGV[6])) do
  saved[i] = save(KEYS[i + 2], unpack(wish))
end
return cjson.encode(saved)
