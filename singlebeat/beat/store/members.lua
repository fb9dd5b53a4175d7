--- members: read some members of a sorted set, in the order of the set, from a position on; writes nothing.
--
-- A position is a score and a member. It holds a place in the order even if that member has moved or is gone.
--
-- KEYS[1]  set     zset: members by score
-- ARGV[1]  part    placed: only scores of 0 and more; parked: only negative scores; all
-- ARGV[2]  order   up or down
-- ARGV[3]  count   members at most
-- ARGV[4]  score   of the position behind which the members are read; empty: read from the beginning
-- ARGV[5]  member  of the position
--
-- returns  JSON array: member and score, alternating; the scores are strings

local set, part, goes_up, count = KEYS[1], ARGV[1], ARGV[2] == "up", tonumber(ARGV[3])

local parked = part ~= "all" and redis.call("ZCOUNT", set, "-inf", "(0") or 0
local first = part == "placed" and parked or 0
local stop = part == "parked" and parked or redis.call("ZCARD", set)  -- the rank behind the last one

--- Compare bytes, as the server does: Lua's own comparison depends on the locale.
local function is_less(one, other)
  for i = 1, math.min(#one, #other) do
    local a, b = string.byte(one, i), string.byte(other, i)
    if a ~= b then
      return a < b
    end
  end
  return #one < #other
end

if ARGV[4] ~= "" then
  local score, member = tonumber(ARGV[4]), ARGV[5]
  local low, high = first, stop  -- the position is between these ranks
  while low < high do
    local middle = math.floor((low + high) / 2)
    local found = redis.call("ZRANGE", set, middle, middle, "WITHSCORES")
    local its = tonumber(found[2])
    local is_before = its < score or (its == score and is_less(found[1], member))
    if is_before or (goes_up and its == score and found[1] == member) then
      low = middle + 1
    else
      high = middle
    end
  end
  if goes_up then
    first = low
  else
    stop = low
  end
end

if first >= stop then
  return "[]"
end
if goes_up then
  return cjson.encode(redis.call("ZRANGE", set, first, math.min(first + count, stop) - 1, "WITHSCORES"))
end
local found, down = redis.call("ZRANGE", set, math.max(first, stop - count), stop - 1, "WITHSCORES"), {}
for i = #found - 1, 1, -2 do
  down[#down + 1], down[#down + 2] = found[i], found[i + 1]
end
return cjson.encode(down)
