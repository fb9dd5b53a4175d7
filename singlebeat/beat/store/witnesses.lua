--- witnesses: read which of the witnesses have lost their places in the schedule; writes nothing.
--
-- KEYS[1]  schedule  zset: members by the time of their next occurrence (s)
-- KEYS[2]  placed    set: some members, the witnesses
--
-- returns  the number of places, the number of witnesses that have theirs, and an array of the other witnesses

local schedule, kept, gone = KEYS[1], 0, {}
for _, member in ipairs(redis.call("SMEMBERS", KEYS[2])) do
  if redis.call("ZSCORE", schedule, member) then
    kept = kept + 1
  else
    gone[#gone + 1] = member
  end
end
return {redis.call("ZCARD", schedule), kept, gone}
