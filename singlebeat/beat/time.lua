--- time: what the clock of the schedule's server shows; writes nothing.
--
-- KEYS[1]  any key of the schedule: a cluster's nodes have clocks of their own
--
-- returns  seconds since 1970, and microseconds of the next one

local _ = KEYS[1]
return redis.call("TIME")
