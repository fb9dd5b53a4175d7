--- resign: end a term of leadership, so that another beat may lead at once; a later term is not touched.
--
-- KEYS[1]  lock    string: the leader's token
-- KEYS[2]  leader  hash: who leads, for people
-- ARGV[1]  token   of the term
--
-- returns  1 ended, 0 it had ended before

local lock, leader = KEYS[1], KEYS[2]
local token = ARGV[1]

if redis.call("GET", lock) ~= token then
  return 0
end
redis.call("DEL", lock, leader)
return 1
