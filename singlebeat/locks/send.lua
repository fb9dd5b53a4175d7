--- send: acquire the locks of calls, and send the message of each call whose lock is granted.
--
-- It uses acquire. A repetition, after its reply was lost, gives the same reply, and writes nothing. So does a copy of the
-- request that the network has held back: if a later request of this sender has come first, no caller waits for the reply.
--
-- KEYS[1]    marker    string in the broker's database: its value proves that the broker is this server
-- KEYS[2]    sent      string: the last reply to this sender, behind the name of its request
-- KEYS[3...] for each call
--            four keys, as in acquire
--            queues    in the broker's database, one for each command
-- ARGV[1]    value     of the marker
-- ARGV[2]    broker    number of the broker's database; empty: that of the locks
-- ARGV[3]    locks     number of the database of the locks
-- ARGV[4]    request   number of this request, higher than those of all earlier requests of the sender
-- ARGV[5]    keep_ms   ms for which the reply is kept for a repetition
-- ARGV[6]    again     as in acquire
-- ARGV[7]    deadline  as in acquire
-- ARGV[8...] for each call
--            call      JSON: an array with the array of the call, as in acquire
--            only      that of the call
--            count     number of its commands
--            commands  for each command: its name (lpush, pexpire, publish) and its argument
--
-- returns  JSON, one array for each call, as in acquire; a call that has acquired its lock, or waits, is sent, unless
--          it asked for the other one of both with "only"
--          refused    the server refuses a command; the second value is its reason; the call may hold its lock
--          In place of the array: elsewhere, if the broker is another server, or the user lacks a right for its
--          database or for sent; then nothing was written. No call has an array if a later request came first

local marker, sent, value, broker, locks = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local request, keep_ms, again, deadline = ARGV[4] .. " ", ARGV[5], ARGV[6], ARGV[7]

local function in_broker(...)
  if broker == "" then
    return redis.pcall(...)
  end
  local selected = redis.pcall("SELECT", broker)
  local reply = selected.err and selected or redis.pcall(...)
  redis.pcall("SELECT", locks)
  return reply
end

if in_broker("GET", marker) ~= value then
  return "elsewhere"
end
local kept = redis.pcall("GET", sent)
if type(kept) == "string" and string.sub(kept, 1, #request) == request then
  return string.sub(kept, #request + 1)
end
local last = type(kept) == "string" and tonumber(string.match(kept, "^(%d+) "))
if last and last > tonumber(ARGV[4]) then
  return "[]"
end
local may_keep = redis.pcall("SET", sent, "", "PX", keep_ms) -- before all other writes: a right may be missing
if may_keep.err then
  local is_denied = string.find(may_keep.err, "NOPERM", 1, true) or string.find(may_keep.err, "ACL failure", 1, true)
    or string.find(may_keep.err, "can't ", 1, true) -- so says Redis 7.0
  return is_denied and "elsewhere" or may_keep
end

--- Return whether no caller waits for the reply any more: all calls are late then, or none.
local function is_late()
  local time = redis.call("TIME")
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  return tonumber(deadline) > 0 and now > tonumber(deadline) and string.format("%.0f", now)
end

local late = is_late()
local key, argument = 3, 8 -- of the next call, in KEYS and ARGV

local function refused(reason)
  return cjson.encode({"refused", reason, "", "0", "0", 0, ""})
end

local function send()
  local keys, call, only = {unpack(KEYS, key, key + 3)}, ARGV[argument], ARGV[argument + 1]
  local count, queue, command = tonumber(ARGV[argument + 2]), key + 4, argument + 3
  key, argument = queue + count, command + 2 * count

  if late then
    return cjson.encode({"late", "", "", late, "0", 0, ""})
  end
  local reply = acquire(keys, {again, "0", call})
  if type(reply) ~= "string" then
    return refused(reply.err)
  end
  local verdict = string.match(reply, '%a+') -- the first word of its first array
  local is_granted = verdict == "acquired" or verdict == "waiting"
  if is_granted and (only == "" or only == verdict) then
    for i = 0, count - 1 do
      local done = in_broker(ARGV[command + 2 * i], KEYS[queue + i], ARGV[command + 2 * i + 1])
      if type(done) == "table" and done.err then
        return refused(done.err)
      end
    end
  end
  return string.sub(reply, 2, -2) -- without the brackets of the array of one call
end

local replies = {}
while argument <= #ARGV do
  replies[#replies + 1] = send()
end
local all = "[" .. table.concat(replies, ",") .. "]"
if #replies == 0 then
  redis.pcall("DEL", sent) -- no call: the sender wants to know whether the broker is here
else
  redis.call("SET", sent, request .. all, "PX", keep_ms)
end
return all
