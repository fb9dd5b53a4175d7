--- record_ends: record the ends of runs that beat has sent.
--
-- KEYS[1]     runs      stream: one record per end
-- KEYS[2...]  entries   hashes: definition; runs: their last ends, a JSON array per line
-- ARGV[1]     limit     records to keep in the stream
-- ARGV[2]     lines     ends that each entry keeps: those of a rare one must not be pushed out by a busy one
-- ARGV[3]     ends      JSON, one array of values for each, in the order of the names below
--
-- returns  nothing; an entry that was deleted meanwhile does not come back

for i, r in ipairs(cjson.decode(ARGV[3])) do
  local at = redis.call("XADD", KEYS[1], "MAXLEN", "~", ARGV[1], "*", "entry", r[1], "id", r[2], "outcome", r[3],
    "reason", r[4], "started", r[5], "duration", r[6], "worker", r[7])
  local stored = redis.pcall("HMGET", KEYS[i + 1], "definition", "runs")
  if stored[1] then
    local line = cjson.encode({at, r[2], r[3], r[4], r[5], r[6], r[7]})
    local lines, before, from = {line .. "\n"}, stored[2] or "", 1
    local stop = string.find(before, "\n", 1, true)
    while stop and #lines < tonumber(ARGV[2]) do -- one that was cut off has no end
      if stop > from then
        lines[#lines + 1] = string.sub(before, from, stop)
      end
      from = stop + 1
      stop = string.find(before, "\n", from, true)
    end
    redis.call("HSET", KEYS[i + 1], "runs", table.concat(lines))
  end
end
