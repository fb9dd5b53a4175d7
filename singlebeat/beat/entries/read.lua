--- read: return fields of some entries; writes nothing.
--
-- KEYS[1...]  entries  hashes
-- ARGV[1...]  fields   names of the fields
--
-- returns  JSON, one array for each entry: the values of the fields in their order, false for an absent field; an error
--          message instead of the array if the key is not a hash. Any other error is the error of the script, such as
--          that of a Redis user who may not read the key

local found = {}
for i, entry in ipairs(KEYS) do
  local fields = redis.pcall("HMGET", entry, unpack(ARGV))
  if fields.err and not string.find(fields.err, "WRONGTYPE", 1, true) then
    return fields
  end
  found[i] = fields.err or fields
end
return cjson.encode(found)
