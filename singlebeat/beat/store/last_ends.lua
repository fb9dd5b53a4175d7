--- last_ends: return the last end of the runs of some entries; writes nothing.
--
-- KEYS[1...]  entries  hashes: runs
-- ARGV[1...]  no_end   outcomes that are no end of a run
--
-- returns  one string: the ids of the records of these ends, with a comma between; empty for an entry without one

local is_no_end = {}
for _, outcome in ipairs(ARGV) do
  is_no_end[outcome] = true
end

local ends = {}
for i, entry in ipairs(KEYS) do
  local runs = redis.pcall("HGET", entry, "runs")
  ends[i] = ""
  if type(runs) == "string" then
    for line in string.gmatch(runs, "[^\n]+") do
      local at, outcome = string.match(line, '^%["(%d+%-%d+)","[^"]*","([^"]*)"')
      if at and not is_no_end[outcome] then
        ends[i] = at
        break
      end
    end
  end
end
return table.concat(ends, ",")
