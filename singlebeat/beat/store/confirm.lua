--- confirm: record decisions about occurrences; the claimed ones are pending no longer.
--
-- A repetition of the call, after its reply was lost, returns "recorded" again and writes nothing, because the last
-- record in the history of the entry is the same. If no history is kept, it returns "confirmed".
--
-- KEYS[1]     pending     zset: keys of entries with an occurrence that is claimed and not confirmed
-- KEYS[2]     history     stream: one record per decision
-- KEYS[3...]  entries     hashes: definition, meta, pending; sent: nominal time of the last run that was sent (s);
--                         history: their last records, a JSON array per line
-- ARGV[1]     limit       records to keep in the stream; 0: keep none
-- ARGV[2]     bytes       to keep of the history of each entry, and its last three records in any case, however long their
--                         reasons are: a busy entry must not evict the records of a rare one
-- ARGV[3]     decisions   JSON, one array for each entry:
--             member      of the entry in pending: its key
--             occurrence  JSON of the occurrence, as it was claimed; empty: no occurrence was claimed
--             meta        new value; empty: leave it
--             since       as it was read, and its new value, empty: delete it; an empty array, or another one is stored: leave it
--             record      values, in the order of the names below
--             sent        nominal time of the occurrence, as a string, if it is a sent run of the schedule; else empty
--
-- returns  JSON, for each decision
--          recorded   done
--          confirmed  another beat had retaken and confirmed the occurrence before
--          gone       its entry was deleted
--          (only recorded writes anything for the entry)
--          an error if the server refuses to write the stream: all the rest was written, or a run would be sent again

local pending, history, limit, bytes = KEYS[1], KEYS[2], ARGV[1], ARGV[2]

local done = {}  -- members that are pending no longer
local refused  -- why the stream was not written

local function confirm(entry, member, occurrence, meta, since, r, sent)
  local stored = redis.pcall("HMGET", entry, "pending", "history", "since")
  local is_hash = not stored.err
  local line = cjson.encode({r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11]}) .. "\n"
  if is_hash and stored[2] and not (occurrence ~= "" and stored[1] == occurrence) then
    local last = string.match(stored[2], "^%[\"[%d-]+\",(.-\n)")
    if last and "[" .. last == line then
      return "recorded"  -- by this call: its reply was lost
    end
  end
  if (occurrence == "" or not stored[1]) and redis.call("EXISTS", entry) == 0 then
    return "gone"
  end
  if occurrence ~= "" and stored[1] ~= occurrence then
    return "confirmed"
  end
  if occurrence ~= "" then
    redis.call("HDEL", entry, "pending")
    done[#done + 1] = member
  end
  local changes = meta ~= "" and {"meta", meta} or {}
  if is_hash and since[1] and since[1] == stored[3] then
    if since[2] == "" then
      redis.call("HDEL", entry, "since")
    else
      changes[#changes + 1], changes[#changes + 2] = "since", since[2]
    end
  end
  if sent ~= "" then
    changes[#changes + 1], changes[#changes + 2] = "sent", sent
  end
  if limit ~= "0" then
    local id = redis.pcall("XADD", history, "MAXLEN", "~", limit, "*", "entry", r[1], "task", r[2], "nominal", r[3],
      "kind", r[4], "decision", r[5], "reason", r[6], "id", r[7], "term", r[8], "holder", r[9], "leader", r[10], "holder_entry",
      r[11])
    if type(id) == "table" then
      refused = id
      local time = redis.call("TIME")
      id = string.format("%.0f-0", time[1] * 1000 + math.floor(time[2] / 1000))
    end
    changes[#changes + 1] = "history"
    local lines = '["' .. id .. '",' .. string.sub(line, 2) .. (stored[2] or "")
    local _, least = string.find(lines, "^[^\n]*\n[^\n]*\n[^\n]*\n")
    changes[#changes + 1] = string.sub(lines, 1, math.max(bytes, least or #lines))
  end
  if #changes > 0 and is_hash then
    redis.call("HSET", entry, unpack(changes))
  end
  return "recorded"
end

local replies = {}
for i, decision in ipairs(cjson.decode(ARGV[3])) do
  replies[i] = confirm(KEYS[i + 2], unpack(decision))
end
if #done > 0 then
  redis.call("ZREM", pending, unpack(done))
end
return refused or cjson.encode(replies)
