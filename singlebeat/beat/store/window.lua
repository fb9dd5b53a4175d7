--- window: read some members of a sorted set with their scores, as JSON, which a client parses faster; writes nothing.
--
-- KEYS[1]  set    zset: members by score
-- ARGV[1]  first  lowest score
-- ARGV[2]  last   highest score
-- ARGV[3]  start  number of members that are left out
-- ARGV[4]  count  of members at most
--
-- returns  JSON array: member and score, alternating; the scores are strings

local found = redis.call("ZRANGEBYSCORE", KEYS[1], ARGV[1], ARGV[2], "WITHSCORES", "LIMIT", ARGV[3], ARGV[4])
return #found > 0 and cjson.encode(found) or "[]"
