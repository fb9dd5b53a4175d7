--- pauses: read the pauses of many entries; writes nothing.
--
-- KEYS[1]  pauses  hash: records by selector
--
-- returns  selector and record, alternating; only an error message if the key is not a hash. Any other error is the
--          error of the script, such as that of a Redis user who may not read the key

local found = redis.pcall("HGETALL", KEYS[1])
if found.err and string.find(found.err, "WRONGTYPE", 1, true) then
  return {found.err}
end
return found
