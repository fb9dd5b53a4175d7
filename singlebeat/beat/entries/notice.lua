--- notice: record what other programs have written into entries without a record, as changes of an unknown writer.
--
-- It uses record. A repetition finds nothing more to record.
--
-- KEYS[1]     changes  stream: as in record
-- KEYS[2...]  entries  hashes: definition, policy, recorded
-- ARGV[1]     limit    as in record
-- ARGV[2]     rows     JSON, one array for each entry:
--             name     of the entry
--             is_new   true: if it has no digests, an unknown writer has added it; else its state now is where the record
--                      begins
--
-- returns  the number of changes that were recorded

local added = 0
for i, row in ipairs(cjson.decode(ARGV[2])) do
  local name, is_new = unpack(row)
  local stored = redis.pcall("HMGET", KEYS[i + 1], "definition", "policy", "recorded")
  if not stored.err and stored[1] then
    local policy, is_added = stored[2] or "", is_new and not stored[3]
    local before = is_added and {"", ""} or {stored[1], policy}
    added = added + record({KEYS[1], KEYS[i + 1]},
      {"", "raw", ARGV[1], name, "edit", "", before[1], before[2], stored[1], policy})
  end
end
return added
