--- unlock: free a lock while a task holds it, whether the task waits, runs or has ended.
--
-- A repetition frees nothing, unless that task has acquired the lock again. A copy of the call that is late leaves the
-- lock of another task alone.
--
-- KEYS[1]  lock  hash: id
-- ARGV[1]  id    of the task
--
-- returns  1 if the lock was freed, 0 if not

if redis.pcall("HGET", KEYS[1], "id") ~= ARGV[1] then -- an error: the key is of another type
  return 0
end
return redis.call("DEL", KEYS[1])
