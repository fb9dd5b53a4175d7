--- fenced: return whether a beat that led would write too late, because another beat leads by now; writes nothing.
--
-- While no beat leads, nothing is fenced: the next leader installs its entries after that.
--
-- KEYS[1]  lock   string: the leader's token
-- ARGV[1]  token  of our term; empty: the writer is no leader, and lock is not read
--
-- returns  1 if another beat leads, else 0

local holder = ARGV[1] ~= "" and redis.call("GET", KEYS[1])
return holder and holder ~= ARGV[1] and 1 or 0
