--- read: the fields of some entries; writes nothing.
--
-- KEYS[1...]  entries  hashes: definition, meta, policy, since, pending, sent
--
-- returns  JSON, one array for each entry: [definition, meta, policy, since, pending, sent], false for what is not
--          there; a text instead of the array says what is wrong with the key. An error that is not the key's, as of a
--          user who may not read it, is the script's

local found = {}
for i, entry in ipairs(KEYS) do
  local fields = redis.pcall("HMGET", entry, "definition", "meta", "policy", "since", "pending", "sent")
  if fields.err and not string.find(fields.err, "WRONGTYPE", 1, true) then
    return fields
  end
  found[i] = fields.err or fields
end
return cjson.encode(found)
