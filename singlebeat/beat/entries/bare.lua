--- bare: return the other member that an entry may have in the schedule; writes nothing.
--
-- A function for scripts.
--
-- KEYS[1]  entry  hash; its key is the prefix and the name
-- ARGV[1]  name   of the entry
--
-- returns  the bare name; the key if that name begins with the prefix, and so is the key of another entry

local prefix = string.sub(KEYS[1], 1, #KEYS[1] - #ARGV[1])
return string.sub(ARGV[1], 1, #prefix) == prefix and KEYS[1] or ARGV[1]
