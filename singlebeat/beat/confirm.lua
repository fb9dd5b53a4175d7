--- confirm: record what became of claimed occurrences; they are pending no longer.
--
-- KEYS[1]     pending     zset: members with an occurrence that is claimed and not confirmed
-- KEYS[2]     history     stream: one record per decision
-- KEYS[3...]  entries     hashes: definition, meta, pending
-- ARGV[1]     limit       records to keep; 0: keep none
-- ARGV[2]     decisions   JSON, one array for each entry:
--             member      of the entry in pending
--             occurrence  JSON of the occurrence, as it was claimed
--             meta        for the entry; empty: leave it
--             record      array of fields and values
--
-- returns  how many were recorded; the others were confirmed before, or their entries are gone

local pending, history, limit = KEYS[1], KEYS[2], ARGV[1]

local function confirm(entry, member, occurrence, meta, record)
  if redis.pcall("HGET", entry, "pending") ~= occurrence then
    return 0
  end
  redis.call("HDEL", entry, "pending")
  redis.call("ZREM", pending, member)
  if meta ~= "" then
    redis.call("HSET", entry, "meta", meta)
  end
  if limit ~= "0" then
    redis.call("XADD", history, "MAXLEN", "~", limit, "*", unpack(record))
  end
  return 1
end

local recorded = 0
for i, decision in ipairs(cjson.decode(ARGV[2])) do
  recorded = recorded + confirm(KEYS[i + 2], unpack(decision))
end
return recorded
