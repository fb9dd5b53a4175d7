--- note_time: store the latest time by which a leader has decided, unless another one is stored than the caller knows.
--
-- So a copy of the call that the network has held back stores no old time. A repetition of the call, after its reply was
-- lost, returns the new time, and writes nothing.
--
-- KEYS[1]  clock  string: the latest time (s)
-- ARGV[1]  found  the time as the caller knows it; empty: none
-- ARGV[2]  time   the new time
--
-- returns  the time that was stored before, empty if there was none: the new one is stored if that is found; an error if
--          the key had another type, and the new one is stored

local stored = redis.pcall("GET", KEYS[1]) or ""
if stored == ARGV[1] or stored.err then
  redis.call("SET", KEYS[1], ARGV[2])
end
return stored
