--- dispatch: claim occurrences, acquire their locks, send their messages, and record the decisions about them.
--
-- It uses claim, acquire and confirm. An occurrence ends at the first step that is denied; if it is claimed by then, it
-- is pending. A repetition, after its reply was lost, gives the same reply, and writes nothing.
--
-- KEYS[1]    broker    string in the broker's database: its value proves that the broker is this server
-- KEYS[2]    locks     string in the database of the locks: the same for the locks
-- KEYS[3]    sent      string: the last reply to this sender, behind the name of its request
-- KEYS[4]    lock      as in claim
-- KEYS[5]    schedule  as in claim
-- KEYS[6]    pending   as in claim and confirm
-- KEYS[7]    history   as in confirm
-- KEYS[8]    pauses    as in claim
-- KEYS[9...] entries   as in claim and confirm, one for each occurrence
--            locks     in their database, four for each occurrence that needs a lock, as in acquire
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
-- ARGV[12]   found     as in claim
-- ARGV[13]   claims    as in claim
-- ARGV[14]   calls     as in acquire, of the occurrences that need a lock
-- ARGV[15]   decisions as in confirm
-- ARGV[16]   messages  JSON, for each occurrence: [the one verdict of acquire with which it goes on; empty: it needs no
--                      lock, number of the commands that send its message; 0: it is not sent]
-- ARGV[17...] commands for each: its name (lpush, pexpire, publish) and its argument
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
  local is_denied = string.find(may_keep.err, "NOPERM", 1, true) or string.find(may_keep.err, "ACL failure", 1, true)
    or string.find(may_keep.err, "can't ", 1, true) -- so says Redis 7.0
  return is_denied and "elsewhere" or may_keep
end

local messages = cjson.decode(ARGV[16])
local count, replies, goes_on = #messages, {}, {}

--- Return the rows of some occurrences from the JSON of all.
local function pick(json, total, numbers)
  if #numbers == total then
    return json
  end
  local all, some = cjson.decode(json), {}
  for i, number in ipairs(numbers) do
    some[i] = all[number]
  end
  return cjson.encode(some)
end

local function claim_all()
  local keys = {KEYS[4], KEYS[5], KEYS[6], KEYS[8], unpack(KEYS, 9, 8 + count)}
  local verdicts, refused = inside("", claim, keys, {ARGV[7], ARGV[8], ARGV[13], ARGV[12], ARGV[9]})
  verdicts = verdicts and cjson.decode(verdicts)
  for i = 1, count do
    replies[i] = {verdicts and verdicts[i] or "", "", "", refused or ""}
    goes_on[i] = replies[i][1] == "claimed"
  end
end

local calls = 0 -- number of the occurrences that need a lock

local function acquire_all()
  local keys, numbers, askers = {}, {}, {}
  for i, message in ipairs(messages) do
    calls = calls + (message[1] ~= "" and 1 or 0)
    if message[1] ~= "" and goes_on[i] then
      numbers[#numbers + 1], askers[#askers + 1] = calls, i
      for key = 4 * calls - 3, 4 * calls do
        keys[#keys + 1] = KEYS[8 + count + key]
      end
    end
  end
  if #numbers == 0 then
    return
  end
  local answers, refused = inside(in_locks, acquire, keys, {"1", "0", pick(ARGV[14], calls, numbers)})
  answers = answers and cjson.decode(answers)
  for n, i in ipairs(askers) do
    replies[i][2], replies[i][4] = answers and answers[n] or "", refused or ""
    goes_on[i] = answers and answers[n][1] == messages[i][1]
  end
end

local function send_all()
  local queue, command = 8 + count + 4 * calls, 17
  for i, message in ipairs(messages) do
    for sent_before = 0, message[2] - 1 do
      queue = queue + 1
      if goes_on[i] then
        local done, refused = inside(in_broker, redis.pcall, ARGV[command], KEYS[queue], ARGV[command + 1])
        replies[i][4] = refused or replies[i][4]
        goes_on[i] = done or sent_before > 0 -- it is in one queue already
      end
      command = command + 2
    end
  end
end

local function confirm_all()
  local keys, numbers = {KEYS[6], KEYS[7]}, {}
  for i = 1, count do
    if goes_on[i] then
      numbers[#numbers + 1] = i
      keys[#keys + 1] = KEYS[8 + i]
    end
  end
  local records, refused = inside("", confirm, keys, {ARGV[10], ARGV[11], pick(ARGV[15], count, numbers)})
  records = records and cjson.decode(records)
  for n, i in ipairs(numbers) do
    replies[i][3] = records and records[n] or "unrecorded"
    replies[i][4] = refused or replies[i][4]
  end
end

claim_all()
acquire_all()
send_all()
confirm_all()
if count == 0 then
  redis.pcall("DEL", sent) -- no occurrence: the sender wants to know whether broker and locks are here
  return "[]"
end
local all = cjson.encode(replies)
redis.call("SET", sent, request .. all, "PX", keep_ms)
return all
