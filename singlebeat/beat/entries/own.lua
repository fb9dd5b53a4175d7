--- own: remember which entries come from the beat_schedule of which apps.
--
-- It uses fenced. A repetition, after its reply was lost, writes the same.
--
-- KEYS[1]  lock     as in fenced
-- KEYS[2]  statics  set: names of the entries that come from beat_schedule
-- KEYS[3]  owners   hash: the apps of each of these names
-- ARGV[1]  token    of our term, as in fenced
-- ARGV[2]  rows     JSON: names and owners of entries, alternating
--
-- returns  "[]", or "null" if another beat leads: then nothing was written

if fenced({KEYS[1]}, {ARGV[1]}) == 1 then
  return "null"
end
local rows, names = cjson.decode(ARGV[2]), {}
for i = 1, #rows, 2 do
  names[#names + 1] = rows[i]
end
redis.call("SADD", KEYS[2], unpack(names))
redis.call("HSET", KEYS[3], unpack(rows))
return "[]"
