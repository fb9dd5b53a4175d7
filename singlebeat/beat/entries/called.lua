--- called: return the names of entries that a call has changed, as the last changes on record say; writes nothing.
--
-- A function for scripts: so they know a call again although what it has written is gone.
--
-- KEYS[1]  changes  stream: as in record
-- ARGV[1]  id       of the call
--
-- returns  a table, true by name; the name of a pause of many entries is empty

local RECENT = 20 -- records that are read
local names = {}
local records = redis.pcall("XREVRANGE", KEYS[1], "+", "-", "COUNT", RECENT)
for _, record in ipairs(records.err and {} or records) do
  local fields = record[2]
  if fields[#fields - 1] == "call" and fields[#fields] == ARGV[1] then
    names[fields[2]] = true
  end
end
return names
