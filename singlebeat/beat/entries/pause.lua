--- pause: pause many entries, or end that pause, unless another program has changed the pause since we read it.
--
-- It uses called and permitted. A repetition of the call, after its reply was lost, returns 1 again and writes nothing, even if
-- others have changed the pause since: its record names the last calls that wrote it, and so do the changes.
--
-- KEYS[1]  pauses    hash: records by selector
-- KEYS[2]  changes   stream: one record per change
-- ARGV[1]  selector  of the entries
-- ARGV[2]  found     its record as we read it; empty: it had none
-- ARGV[3]  record    JSON that replaces it; its field written names this call and those before
-- ARGV[4]  over      JSON: selector and record as we read it, alternating, of pauses that ended long ago: removed
-- ARGV[5]  actor     who changes the pause
-- ARGV[6]  by        by what means
-- ARGV[7]  limit     changes to keep; 0: keep none
-- ARGV[8]  action    pause or resume
-- ARGV[9]  note      of the change
-- ARGV[10] id        of this call
--
-- returns  1 done, 0 another program has changed the record meanwhile; an error if the server refuses a command, and
--          nothing was written

local pauses, selector, found, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local stored = redis.call("HGET", pauses, selector) or ""
if string.find(stored, ARGV[10], 1, true) or called({KEYS[2]}, {ARGV[10]})[""] then
  return 1  -- by this call: its reply was lost
end
if stored ~= found then
  return 0
end
local refused = permitted({pauses, pauses}, {"HSET", "HDEL"})
if refused then
  return refused
end

if ARGV[7] ~= "0" then
  redis.call("XADD", KEYS[2], "MAXLEN", "~", ARGV[7], "*", "entry", "", "actor", ARGV[5], "by", ARGV[6], "action", ARGV[8],
    "before", cjson.encode({[selector] = found}), "after", cjson.encode({[selector] = record}), "note", ARGV[9], "call", ARGV[10])
end
local over = cjson.decode(ARGV[4])
for i = 1, #over, 2 do
  if redis.call("HGET", pauses, over[i]) == over[i + 1] then
    redis.call("HDEL", pauses, over[i])
  end
end
redis.call("HSET", pauses, selector, record)
return 1
