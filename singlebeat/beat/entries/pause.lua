--- pause: pause many entries, or end that pause, unless another program has changed the pause since we read it.
--
-- A repetition of the call, after its reply was lost, returns 1 again and writes nothing.
--
-- KEYS[1]  pauses    hash: records by selector
-- ARGV[1]  selector  of the entries
-- ARGV[2]  found     its record as we read it; empty: it had none
-- ARGV[3]  record    JSON that replaces it
-- ARGV[4]  over      JSON: selector and record as we read it, alternating, of pauses that ended long ago: removed
--
-- returns  1 done, 0 another program has changed the record meanwhile

local pauses, selector, found, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local stored = redis.call("HGET", pauses, selector) or ""
if stored == record then
  return 1  -- by this call: its reply was lost
end
if stored ~= found then
  return 0
end

local over = cjson.decode(ARGV[4])
for i = 1, #over, 2 do
  if redis.call("HGET", pauses, over[i]) == over[i + 1] then
    redis.call("HDEL", pauses, over[i])
  end
end
redis.call("HSET", pauses, selector, record)
return 1
