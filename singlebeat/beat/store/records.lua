--- records: read some records of a stream, the latest first; writes nothing.
--
-- KEYS[1]    stream   the history, or the ends of runs
-- ARGV[1]    before   id of the record before which to begin; empty: begin with the last record
-- ARGV[2]    count    records that are looked at
-- ARGV[3]    entries  JSON array of names: return only their records; empty: of each entry only its last record
-- ARGV[4...] left out outcomes of records that are passed over
--
-- returns  JSON array: the id of the last record that was looked at, empty if there was none; then for each record an
--          array of its id, and of names and values, alternating

local before, names = ARGV[1] == "" and "+" or "(" .. ARGV[1], ARGV[3] ~= "" and cjson.decode(ARGV[3])

local is_named, is_left_out, is_seen = {}, {}, {}
for _, name in ipairs(names or {}) do
  is_named[name] = true
end
for i = 4, #ARGV do
  is_left_out[ARGV[i]] = true
end

local found = redis.pcall("XREVRANGE", KEYS[1], before, "-", "COUNT", ARGV[2])
if found.err then
  return string.find(found.err, "WRONGTYPE", 1, true) and '[""]' or found  -- another program has taken the key
end
local rows = {#found > 0 and found[#found][1] or ""}
for _, record in ipairs(found) do
  local values, entry, outcome = record[2], nil, ""
  for i = 1, #values, 2 do
    if values[i] == "entry" then
      entry = values[i + 1]
    elseif values[i] == "outcome" then
      outcome = values[i + 1]
    end
  end
  if entry and not is_left_out[outcome] and (is_named[entry] or not (names or is_seen[entry])) then
    is_seen[entry] = true
    rows[#rows + 1] = {record[1], values}
  end
end
return cjson.encode(rows)
