--- delete: remove an entry with its places, its quarantine record and the copy that is kept of it, and record that.
--
-- It uses bare, called, permitted and record. A repetition finds nothing to remove, and returns 1 if the change is on
-- record, else 0. A copy of the call that is late leaves alone what was stored meanwhile.
--
-- KEYS[1]  schedule    zset: members by the time of their next occurrence (s)
-- KEYS[2]  pending     zset: members with an occurrence that is claimed and not confirmed
-- KEYS[3]  quarantine  hash: members that are quarantined
-- KEYS[4]  owners      hash: the apps of the entries of beat_schedule
-- KEYS[5]  parked      hash: the copy of the entry
-- KEYS[6]  changes     stream: as in record
-- KEYS[7]  entry       hash; a key that holds something else stays, and so does a hash without any field of an entry
-- ARGV[1]  name        of the entry
-- ARGV[2]  actor       as in record
-- ARGV[3]  by          as in record
-- ARGV[4]  limit       as in record
-- ARGV[5]  found       JSON: definition, policy and written as the caller has read them, empty strings if absent
-- ARGV[6]  id          of this call
--
-- returns  1 if there was anything to remove, 0 if not, -1 if another process has changed the entry since it was read; an
--          error if the server refuses a command, and nothing was written

local schedule, pending, quarantine, owners = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local parked, changes, entry, name = KEYS[5], KEYS[6], KEYS[7], ARGV[1]
local stored = redis.pcall("HMGET", entry, "definition", "policy", "meta", "since", "pending", "sent",
  "written")
local is_entry = false
for i = 1, 6 do
  is_entry = is_entry or (stored[i] or "") ~= ""
end

if called({changes}, {ARGV[6]})[name] then
  return 1 -- another program may have stored the entry again, without any id
end
local found = cjson.decode(ARGV[5])
local is_same = found[1] == stored[1] and found[2] == (stored[2] or "") and found[3] == (stored[7] or "")
if stored[1] and not is_same then
  return -1
end
local refused = permitted({schedule, quarantine, entry}, {"ZREM", "HDEL", "DEL"})
if refused then
  return refused
end
if is_entry and stored[1] then
  record({changes, entry}, {ARGV[2], ARGV[3], ARGV[4], name, "delete", "", stored[1], stored[2] or "", "", "", ARGV[6]})
end
local removed = 0
for _, member in ipairs({entry, bare({entry}, {name})}) do
  removed = removed + redis.call("ZREM", schedule, member) + redis.call("ZREM", pending, member)
    + redis.call("HDEL", quarantine, member)
end
removed = removed + redis.call("HDEL", owners, name) -- any app may install an entry of this name then
  + redis.call("DEL", parked) + (is_entry and redis.call("DEL", entry) or 0)
return removed > 0 and 1 or 0
