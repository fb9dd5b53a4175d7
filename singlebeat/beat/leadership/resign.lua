--- resign: end a term of leadership, so that another beat may lead at once; a later term is not touched.
--
-- A repetition of the call, after its reply was lost, returns the same as long as no other beat leads. If a beat ends
-- its own term, a repetition returns 0.
--
-- KEYS[1]  lock      string: the leader's token
-- KEYS[2]  leader    hash: the leader, for operators
-- KEYS[3]  standbys  zset: the beats that stand by, by the time until which they count as alive (ms)
-- KEYS[4]  resigned  string: host and pid of the beat whose term was ended so that a standby leads next
-- ARGV[1]  token     of the term
-- ARGV[2]  standby   JSON: the member of standbys that the caller removes, its own; empty: none
-- ARGV[3]  wait_ms   how long the beat whose term this ends lets standbys lead first; 0: that beat never comes back
--
-- returns  1 ended
--          0 another beat leads, or the caller's own term had ended: only standby was removed

local lock, leader, standbys, resigned = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, standby, wait = ARGV[1], ARGV[2], ARGV[3]

redis.call("ZREM", standbys, standby)
local holder = redis.call("GET", lock)
if holder ~= token then
  return not holder and wait ~= "0" and 1 or 0
end
if wait ~= "0" and redis.call("EXISTS", standbys) == 1 then
  local name = redis.pcall("HMGET", leader, "host", "pid")  -- another program may have spoilt it
  redis.call("SET", resigned, (name[1] or "") .. ":" .. (name[2] or ""), "PX", wait)
end
redis.call("DEL", lock, leader)
return 1
