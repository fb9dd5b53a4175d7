--- shorten: leave a lock no more than the time that it was given, if that was before the clock was set back.
--
-- A function for other scripts. Redis keeps the end of a key as an instant of its clock. A living worker renews its lock
-- before the shortened end, too. A repetition writes nothing.
--
-- KEYS[1]  lock     hash, as in acquire
-- ARGV[1]  now      the server's time (ms)
-- ARGV[2]  state    state of the lock
-- ARGV[3]  since    time (ms) since which it is in that state, false if the record does not say
-- ARGV[4]  renewed  time (ms) of its last renewal, likewise; holds for a running lock
--
-- returns  nothing

local now, state, since, renewed = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ahead = (state == "running" and tonumber(renewed) or tonumber(since) or 0) - now
local given = ahead > 0 and redis.call("PTTL", KEYS[1]) - ahead or 0
if 0 < given and given < ahead then -- once: from then on the difference is negative
  redis.call("PEXPIRE", KEYS[1], string.format("%.0f", given))
end
