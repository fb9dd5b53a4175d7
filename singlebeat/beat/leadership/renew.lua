--- renew: prolong a term of leadership; a term that has ended is never resumed.
--
-- A repetition of the call, after its reply was lost, prolongs the term again. What another program has removed or
-- spoilt of leader and term is as before then.
--
-- KEYS[1]    lock    string: the leader's token
-- KEYS[2]    leader  hash: the leader, for operators, how far its host's clock is ahead, and what a renewal took
-- KEYS[3]    term    int: number of the last term
-- ARGV[1]    token   of the term
-- ARGV[2]    ttl_ms  how long leadership lasts from now on
-- ARGV[3]    number  of the term: a campaign that the server executed late may have begun another term with its token
-- ARGV[4...] record  of leader: fields and values alternating
--
-- returns  1 prolonged, 0 the term has ended

local lock, leader, term = KEYS[1], KEYS[2], KEYS[3]
local token, ttl, number = ARGV[1], ARGV[2], ARGV[3]

local function is_of_wrong_type(reply)
  return type(reply) == "table" and reply.err and string.find(reply.err, "WRONGTYPE", 1, true)
end

if redis.call("GET", lock) ~= token then
  return 0
end
local last = redis.pcall("GET", term)
local is_spoilt = not last or is_of_wrong_type(last)
if last ~= number and not is_spoilt then
  return type(last) == "table" and last or 0
end
redis.call("PEXPIRE", lock, ttl)
if is_spoilt then
  redis.pcall("SET", term, number)  -- else the numbers would begin anew, as if the server had lost its data
end
-- A server without free memory refuses it, and the term goes on.
if is_of_wrong_type(redis.pcall("HSET", leader, unpack(ARGV, 4))) then
  redis.call("DEL", leader)
  redis.call("HSET", leader, unpack(ARGV, 4))
end
redis.call("PEXPIRE", leader, ttl)
return 1
