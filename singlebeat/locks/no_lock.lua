--- no_lock: return what is wrong with keys that hold a hash of other data, such as an entry of the schedule.
--
-- A function for other scripts.
--
-- KEYS[1...]  hashes that should be locks, or should not exist; the first is the lock itself
-- ARGV[1...]  the field id of each; false: it is missing
--
-- returns  a sentence that names the first key with other data; nil if there is none

for i, key in ipairs(KEYS) do
  if not ARGV[i] and redis.call("EXISTS", key) == 1 then
    return (i > 1 and key .. ": " or "") .. "it is a hash of other data: a lock has the field id"
  end
end
return nil
