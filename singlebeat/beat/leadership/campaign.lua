--- campaign: become the leader, or learn that another beat leads and stand by.
--
-- A repetition of the call, after its reply was lost, returns the same, and the term lasts ttl_ms from then on.
--
-- KEYS[1]  lock      string: the leader's token (the protocol of redis-py's lock, so RedBeat's beats are kept out, too)
-- KEYS[2]  leader    hash: the leader, for operators, its token and lease_ms; expires with the lock
-- KEYS[3]  term      int: counts the terms of leadership
-- KEYS[4]  standbys  zset: the beats that stand by, by the time until which they count as alive (ms)
-- KEYS[5]  resigned  string: host and pid of the beat whose term was ended so that a standby leads next
-- ARGV[1]  token     ours, the same until a campaign was answered, then a new token
-- ARGV[2]  ttl_ms    how long leadership lasts from now on
-- ARGV[3]  last      token of our last campaign: a lock with this token does not keep us out
-- ARGV[4]  standby   JSON, for operators: host, pid and since when we stand by, and more
-- ARGV[5]  stay_ms   how long a standby counts as alive after its last campaign
-- ARGV[6]  before    standby as it was at the last campaign; empty: it has not changed
-- ARGV[7]  name      our host and pid, as in resigned
-- ARGV[8...] record  of leader, but for the number of the term: fields and values alternating
--
-- returns  the number of our term, and the time of the server (seconds, microseconds). The number is 0 if another beat
--          leads or is to lead. Then the script has only stored that we stand by, and shortened a lock that would
--          outlive its lease because the server's clock was set back; a fourth number says when the lock ends unless
--          it is renewed (ms), 0 if none is held. It is -1 if another program has written something else into term
--          than a number as this script counts them: no beat can lead then, and nothing is written

local lock, leader, term, standbys, resigned = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local token, ttl, last, standby, stay, before, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]

local time = redis.call("TIME")

local function stand_by()
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if before ~= "" then
    redis.call("ZREM", standbys, before)
  end
  redis.call("ZREMRANGEBYSCORE", standbys, "-inf", string.format("%.0f", now))
  redis.call("ZADD", standbys, string.format("%.0f", now + stay), standby)
  redis.call("PEXPIRE", standbys, stay)
  return {0, time[1], time[2], math.max(0, redis.call("PTTL", lock))}
end

-- Numbers with more digits would not come out of Lua as they are, and INCR refuses leading zeros.
local function is_unusable(number)
  if type(number) == "table" then  -- an error; another one than this is met by the next command
    return string.find(number.err, "WRONGTYPE", 1, true)
  end
  return number and number ~= "0" and (#number > 13 or not string.find(number, "^[1-9]%d*$"))
end

local holder = redis.call("GET", lock)
if holder == token then
  if is_unusable(redis.pcall("GET", term)) then
    return {-1, time[1], time[2]}
  end
  redis.call("PEXPIRE", lock, ttl)
  redis.call("PEXPIRE", leader, ttl)
  return {tonumber(redis.call("GET", term)), time[1], time[2]}
end
if holder and holder ~= last then
  -- Redis stores the expiry as an instant of its clock. A living leader renews the lock before the shortened end, too.
  local record = redis.pcall("HMGET", leader, "token", "lease_ms")  -- another program may have spoilt it
  local lease = record[1] == holder and tonumber(record[2])
  if lease and redis.call("PTTL", lock) > lease then
    redis.call("PEXPIRE", lock, lease)
    redis.call("PEXPIRE", leader, lease)
  end
  return stand_by()
end
if redis.call("GET", resigned) == name and redis.call("PTTL", resigned) <= tonumber(stay) then
  return stand_by()
end

if is_unusable(redis.pcall("GET", term)) then
  return {-1, time[1], time[2]}
end

-- Tried on a key that goes: without memory, or without these rights, nothing else is written. Redis checks its memory
-- before the first write alone. The lock comes last: where another command is refused, no beat holds it.
redis.call("SET", resigned, "", "PX", ttl)
redis.call("PEXPIRE", resigned, ttl)
redis.call("DEL", leader, resigned)
redis.call("ZREM", standbys, standby, before)
local number = tonumber(redis.call("GET", term) or 0) + 1
redis.call("HSET", leader, "term", number, unpack(ARGV, 8))
redis.call("PEXPIRE", leader, ttl)
redis.call("INCR", term)
redis.call("SET", lock, token, "PX", ttl)
return {number, time[1], time[2]}
