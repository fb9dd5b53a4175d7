--- place: move entries to earlier places in the schedule, and store the zone in which their schedules were read.
--
-- KEYS[1]     lock      string: the leader's token
-- KEYS[2]     schedule  zset: members by the time of their next occurrence (s)
-- KEYS[3]     zone      string: the app's zone, in which the places of the schedule were computed
-- ARGV[1]     token     of our term; empty: leadership is switched off
-- ARGV[2]     name      of the zone, once all places were computed in it; empty: they were not, leave the stored name
-- ARGV[3...]  places    score and member, alternating
--
-- An entry that is parked, or later than its new place, is moved; an earlier or deleted entry is left. The tick that
-- reads an entry too early corrects its place. So a repetition, or another writer in between, does no harm.
--
-- returns  1: done; 0: another beat leads, nothing was written

local lock, schedule, zone, token, name = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
if token ~= "" and redis.call("GET", lock) ~= token then
  return 0
end

for i = 3, #ARGV, 2 do
  local score = redis.call("ZSCORE", schedule, ARGV[i + 1])
  if score and (tonumber(score) < 0 or tonumber(score) > tonumber(ARGV[i])) then
    redis.call("ZADD", schedule, ARGV[i], ARGV[i + 1])
  end
end
if name ~= "" then
  redis.call("SET", zone, name)
end
return 1
