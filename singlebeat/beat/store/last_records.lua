--- last_records: read the last record of each stream, and what has become of an earlier one; writes nothing.
--
-- KEYS[1...]  streams  records in the order of their ids; the first ones may have been removed, as by XTRIM
-- ARGV[1...]  seen     for each stream the id of a record that was in it; empty: none is known
--
-- returns  for each stream the id of its last record, and the last one that is not later than the one seen, each empty
--          if there is none, or if the stream cannot be read

local found = {}

local function last_until(stream, id)
  local rows = redis.pcall("XREVRANGE", stream, id, "-", "COUNT", 1)
  return not rows.err and rows[1] and rows[1][1] or ""
end

for i, stream in ipairs(KEYS) do
  found[#found + 1] = last_until(stream, "+")
  found[#found + 1] = ARGV[i] ~= "" and last_until(stream, ARGV[i]) or ""
end
return found
