--- campaign: become the leader, or learn that another leads.
--
-- KEYS[1]  lock    string: the leader's token (the protocol of redis-py's lock, so RedBeat's beats are kept out, too)
-- KEYS[2]  leader  hash: who leads, for people; lives as long as the lock
-- KEYS[3]  term    int: counts the terms of leadership
-- ARGV[1]  token   ours, new for each campaign
-- ARGV[2]  ttl_ms  how long leadership lasts from now on
-- ARGV[3]  host    ours, for people
-- ARGV[4]  pid     ours, for people
-- ARGV[5]  since   now, as an ISO date, for people
-- ARGV[6]  last    token of our last term, which we have given up: what is left of it does not keep us out
--
-- returns  the number of our term; 0: another leads, and nothing was written

local lock, leader, term = KEYS[1], KEYS[2], KEYS[3]
local token, ttl, last = ARGV[1], ARGV[2], ARGV[6]

local holder = redis.call("GET", lock)
if holder and holder ~= last then
  return 0
end

local number = redis.call("INCR", term)
redis.call("SET", lock, token, "PX", ttl)
redis.call("DEL", leader)
redis.call("HSET", leader, "host", ARGV[3], "pid", ARGV[4], "since", ARGV[5], "term", number)
redis.call("PEXPIRE", leader, ttl)
return number
