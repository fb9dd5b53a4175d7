--- record: add a change of an entry to the record of changes, before it is made; the entry keeps digests of what it adds.
--
-- If the digests show that another program has changed the entry without a record, that change is added first, as one of
-- an unknown writer; without digests that writer has added the entry. A repetition of the call, or a call without a
-- change, adds nothing else.
--
-- KEYS[1]  changes     stream: one record per change
-- KEYS[2]  entry       hash: meta, since, sent, pending, backfill; recorded: digests of definition and policy as they were recorded last
-- ARGV[1]  actor       who changes the entry
-- ARGV[2]  by          by what means
-- ARGV[3]  limit       records to keep; 0: keep none
-- ARGV[4]  name        of the entry
-- ARGV[5]  action      what is done to it; "edit" means "add" if it does not exist
-- ARGV[6]  note        for operators
-- ARGV[7]  definition  of the entry now, an empty string if absent
-- ARGV[8]  policy      of the entry now, an empty string if absent
-- ARGV[9]  wanted      definition that it gets; empty: it is removed
-- ARGV[10] wishes      policy that it gets
-- ARGV[11] call        id of the call that changes it, if the caller asks for it later; or absent
--
-- returns  the number of records that were added; an error if the server refuses to write the stream: then nothing was
--          written. The changes of a beat_schedule are then made without a record: else no entry would run

local changes, entry, limit, name = KEYS[1], KEYS[2], ARGV[3], ARGV[4]
local definition, policy, wanted, wishes = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local action = ARGV[5] == "edit" and definition == "" and "add" or ARGV[5]

local function digest(text)
  return string.sub(redis.sha1hex(text), 1, 12)
end

local xadd = ARGV[2] == "beat_schedule" and redis.pcall or redis.call

local function add(actor, by, what, before, after, note, call)
  xadd("XADD", changes, "MAXLEN", "~", limit, "*", "entry", name, "actor", actor, "by", by, "action", what,
    "before", cjson.encode(before), "after", cjson.encode(after), "note", note, unpack(call and {"call", call} or {}))
end

local stored = redis.pcall("HMGET", entry, "recorded", "meta", "since", "pending", "backfill", "sent")
local recorded = stored[1] or ""
if limit == "0" then  -- and what happens meanwhile is not taken for that of an unknown writer
  if recorded ~= "" then
    redis.call("HDEL", entry, "recorded")
  end
  return 0
end

local added, is_change = 0, definition ~= wanted or policy ~= wishes
if definition ~= "" and recorded ~= digest(definition) .. digest(policy) and (recorded ~= "" or is_change) then
  local is_add, now = recorded == "", {}
  if string.sub(recorded, 1, 12) ~= digest(definition) then
    now.definition = definition
  end
  if string.sub(recorded, 13) ~= digest(policy) then
    now.policy = policy
  end
  add("", "raw", is_add and "add" or "edit", is_add and {definition = "", policy = ""} or {}, now, "")
  added = 1
end
if is_change then
  local before, after = {}, {}
  if definition ~= wanted then
    before.definition, after.definition = definition, wanted
  end
  if policy ~= wishes or wanted == "" then
    before.policy, after.policy = policy, wishes
  end
  if wanted == "" then
    before.meta, before.since = stored[2] or "", stored[3] or ""
    before.pending, before.backfill, before.sent = stored[4] or nil, stored[5] or nil, stored[6] or nil
  end
  add(ARGV[1], ARGV[2], action, before, after, ARGV[6], ARGV[11])
  added = added + 1
end
if wanted ~= "" and recorded ~= digest(wanted) .. digest(wishes) then
  redis.call("HSET", entry, "recorded", digest(wanted) .. digest(wishes))
end
return added
