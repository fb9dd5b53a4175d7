--- renew: prolong a term of leadership; a term that has ended is never resumed.
--
-- A repetition of the call, after its reply was lost, prolongs the term again.
--
-- KEYS[1]  lock    string: the leader's token
-- KEYS[2]  leader  hash: the leader, for operators, how far its host's clock is ahead, and what a renewal took
-- KEYS[3]  term    int: number of the last term
-- ARGV[1]  token   of the term
-- ARGV[2]  ttl_ms  how long leadership lasts from now on
-- ARGV[3]  ahead   seconds by which our host's clock is ahead of the server's, for operators
-- ARGV[4]  number  of the term: a campaign that the server executed late may have begun another term with its token
-- ARGV[5]  took    seconds that the renewal before this one took, for operators; 0 if there was none
--
-- returns  1 prolonged, 0 the term has ended

local lock, leader, term = KEYS[1], KEYS[2], KEYS[3]
local token, ttl, number = ARGV[1], ARGV[2], ARGV[4]

if redis.call("GET", lock) ~= token or redis.call("GET", term) ~= number then
  return 0
end
redis.call("PEXPIRE", lock, ttl)
redis.pcall("HSET", leader, "ahead", ARGV[3], "took", ARGV[5])  -- a server without free memory refuses it, and the term goes on
redis.call("PEXPIRE", leader, ttl)
return 1
