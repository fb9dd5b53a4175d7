--- dispatch: claim occurrences, acquire their locks, send their messages, and record the decisions about them.
--
-- It uses claim, acquire and confirm. Each occurrence ends at the first step that is denied; after "claimed", such an
-- occurrence is pending. A repetition, after its reply was lost, gives the same reply, and writes nothing.
--
-- KEYS[1]    broker    string in the broker's database: its value proves that the broker is this server
-- KEYS[2]    locks     string in the database of the locks: the same for the locks
-- KEYS[3]    sent      string: the last reply to this sender, behind the name of its request
-- KEYS[4]    lock      as in claim
-- KEYS[5]    schedule  as in claim
-- KEYS[6]    pending   as in claim and confirm
-- KEYS[7]    history   as in confirm
-- KEYS[8...] for each occurrence
--            entry     as in claim and confirm
--            four keys, as in acquire, in the database of the locks, if the occurrence needs a lock
--            queues    in the broker's database, one for each command
-- ARGV[1]    values    of broker and locks, with a space between
-- ARGV[2]    broker    number of the broker's database; empty: that of the schedule
-- ARGV[3]    locks     number of the database of the locks; empty: that of the schedule
-- ARGV[4]    own       number of the database of the schedule
-- ARGV[5]    request   name of this request, without a space; no other request of the sender has it
-- ARGV[6]    keep_ms   ms for which the reply is kept for a repetition
-- ARGV[7]    token     as in claim
-- ARGV[8]    retry_at  as in claim
-- ARGV[9]    leads     as in claim
-- ARGV[10]   limit     as in confirm
-- ARGV[11]   bytes     as in confirm
-- ARGV[12...] for each occurrence
--            claim     JSON: an array with the array of the claim, as in claim
--            call      JSON: an array with the array of the call, as in acquire; empty: it needs no lock
--            only      the one verdict of acquire with which it goes on
--            count     number of the commands that send its message; 0: it is not sent
--            commands  for each command: its name (lpush, pexpire, publish) and its argument
--            decision  JSON: an array with the array of the decision, as in confirm
--
-- returns  JSON, for each occurrence an array: [verdict of claim or "", reply of acquire or "", reply of confirm or "",
--          why the server refuses a step or ""]; the reply of confirm is empty if the message is not sent, and
--          "unrecorded" if the server refuses to record that it is sent
--          In place of the array: elsewhere, if broker or locks are on another server, or the user lacks a right for
--          their databases or for sent; then nothing was written

local sent, in_broker, in_locks, own = KEYS[3], ARGV[2], ARGV[3], ARGV[4]
local request, keep_ms = ARGV[5] .. " ", ARGV[6]

--- Call a function in another database of this server; return its result, or nil and the server's reason.
local function inside(database, call, ...)
  if database ~= "" then
    local selected = redis.pcall("SELECT", database)
    if selected.err then
      return nil, selected.err
    end
  end
  local is_done, result = pcall(call, ...)
  if database ~= "" then
    redis.call("SELECT", own)
  end
  if is_done and not (type(result) == "table" and result.err) then
    return result
  end
  return nil, type(result) == "table" and result.err or tostring(result)
end

local function reads(database, key)
  local value = inside(database, redis.pcall, "GET", key)
  return type(value) == "string" and value or ""
end

if reads(in_broker, KEYS[1]) .. " " .. reads(in_locks, KEYS[2]) ~= ARGV[1] then
  return "elsewhere"
end
local kept = redis.pcall("GET", sent)
if type(kept) == "string" and string.sub(kept, 1, #request) == request then
  return string.sub(kept, #request + 1)
end
local may_keep = redis.pcall("SET", sent, "", "PX", keep_ms) -- before all other writes: a right may be missing
if may_keep.err then
  return string.find(may_keep.err, "NOPERM", 1, true) and "elsewhere" or may_keep
end

local key, argument = 8, 12 -- of the next occurrence, in KEYS and ARGV

local function dispatch()
  local entry, wish, call, only, count = KEYS[key], unpack(ARGV, argument, argument + 3)
  local lock, queue = key + 1, key + (call == "" and 1 or 5)
  local command, decision = argument + 4, argument + 4 + 2 * count
  key, argument = queue + count, decision + 1

  local claimed, refused =
    inside("", claim, {KEYS[4], KEYS[5], KEYS[6], entry}, {ARGV[7], ARGV[8], wish, ARGV[9]})
  local verdict = claimed and cjson.decode(claimed)[1] or ""
  if verdict ~= "claimed" then
    return {verdict, "", "", refused or ""}
  end
  local answer = ""
  if call ~= "" then
    local reply
    reply, refused = inside(in_locks, acquire, {unpack(KEYS, lock, lock + 3)}, {"1", "0", call})
    if not reply then
      return {verdict, "", "", refused}
    end
    answer = cjson.decode(reply)[1]
    if answer[1] ~= only then
      return {verdict, answer, "", ""}
    end
  end
  local reason = ""
  for i = 0, count - 1 do
    local done
    done, refused =
      inside(in_broker, redis.pcall, ARGV[command + 2 * i], KEYS[queue + i], ARGV[command + 2 * i + 1])
    if not done and i == 0 then
      return {verdict, answer, "", refused}
    end
    reason = refused or reason -- the message is in a queue already
  end
  local recorded
  recorded, refused = inside("", confirm, {KEYS[6], KEYS[7], entry}, {ARGV[10], ARGV[11], ARGV[decision]})
  return {verdict, answer, recorded and cjson.decode(recorded)[1] or "unrecorded", refused or reason}
end

local replies = {}
while argument <= #ARGV do
  replies[#replies + 1] = dispatch()
end
local all = cjson.encode(replies)
redis.call("SET", sent, request .. all, "PX", keep_ms)
return all
