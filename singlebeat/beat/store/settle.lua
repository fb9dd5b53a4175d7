--- settle: claim occurrences of entries, and record the decisions about those that are not to be sent.
--
-- It uses claim and confirm. A repetition, after its reply was lost, gives the same reply, and writes nothing.
--
-- KEYS[1]     lock       as in claim
-- KEYS[2]     schedule   as in claim
-- KEYS[3]     pending    as in claim and confirm
-- KEYS[4]     pauses     as in claim
-- KEYS[5]     history    as in confirm
-- KEYS[6...]  entries    as in claim and confirm
-- ARGV[1]     token      as in claim
-- ARGV[2]     retry_at   as in claim
-- ARGV[3]     claims     as in claim
-- ARGV[4]     found      as in claim
-- ARGV[5]     leads      as in claim
-- ARGV[6]     limit      as in confirm
-- ARGV[7]     bytes      as in confirm
-- ARGV[8]     decisions  JSON, for each entry: an array as in confirm; empty: there is no decision yet
--
-- returns  as claim; the decision of each entry that is "claimed" is recorded
--          an error if the server refuses to write the stream: all the rest was written

local asked = {ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]}
local claimed = claim({KEYS[1], KEYS[2], KEYS[3], KEYS[4], unpack(KEYS, 6)}, asked)
if type(claimed) == "table" then
  return claimed  -- an error
end
local verdicts = cjson.decode(claimed)
local keys, rows = {KEYS[3], KEYS[5]}, {}
for i, row in ipairs(cjson.decode(ARGV[8])) do
  if #row > 0 and verdicts[i] == "claimed" then
    keys[#keys + 1], rows[#rows + 1] = KEYS[5 + i], row
  end
end
local reply = #rows > 0 and confirm(keys, {ARGV[6], ARGV[7], cjson.encode(rows)})
if type(reply) == "table" then
  return reply
end
return cjson.encode(verdicts)
