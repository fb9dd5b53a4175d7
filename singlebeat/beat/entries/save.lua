--- save: store entries, each unless another program has changed the fields to be stored since we read them.
--
-- A repetition of the call, after its reply was lost, returns true again, even if a beat has claimed the entry
-- meanwhile, unless the entry is new. If definition and policy were to stay the same, it may return false: read the
-- entry again.
--
-- KEYS[1]     schedule  zset: members by the time of their next occurrence (s)
-- KEYS[2...]  entries   hashes: definition, meta, policy, since
-- ARGV[1]     wishes    JSON, one array for each entry:
--             member      of the entry in the schedule
--             found       [definition, meta, policy, since] as we read them, false for an absent field
--             fields      [definition, meta, policy, since] to be stored; an empty string: remove the field;
--                         false: leave the field, it may have changed
--             score       of the next occurrence, as a string; empty: leave it
--
-- returns  JSON, for each entry whether it was stored

local schedule = KEYS[1]

local names = {"definition", "meta", "policy", "since"}

local function save(entry, member, found, fields, score)
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

  for i, name in ipairs(names) do
    if fields[i] == "" and stored[i] then
      redis.call("HDEL", entry, name)
    elseif fields[i] and fields[i] ~= "" and fields[i] ~= stored[i] then
      redis.call("HSET", entry, name, fields[i])
    end
  end
  if score ~= "" then
    redis.call("ZADD", schedule, score, member)
  end
  return true
end

local saved = {}
for i, wish in ipairs(cjson.decode(ARGV[1])) do
  saved[i] = save(KEYS[i + 1], unpack(wish))
end
return cjson.encode(saved)
