--- rotate: hand a run's lock over to a waiting message of the same task id.
--
-- A retry or replace has a higher generation; a message that goes back to the broker keeps its generation.
--
-- KEYS[1]  lock       hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload; uncut (ms), as in
--                     acquire
-- KEYS[2]  done       zset: "id:generation" of runs that ended under this lock recently, by time (ms)
-- ARGV[1]  id         task id that must hold the lock
-- ARGV[2]  nonce      the run that must hold the lock; empty: the lock must be queued
-- ARGV[3]  to_gen     the generation that holds the lock from now on, queued; never lower than the current generation
-- ARGV[4]  ttl_ms     lifetime of the lock from now on
-- ARGV[5]  done_ms    ms for which the end of a generation is remembered
--
-- returns  {verdict, id of the holder, state, since (ms), fence, ttl (ms)}
--          rotated  the lock was handed over
--          lost     that run or queued message does not hold the lock, or the key has another type, or a field that must
--                   be a number is none; nothing was written
--
-- Uses numbers. A message that goes back to the broker keeps the payload; a retry has its own arguments.
-- A repetition gives the same reply, and writes nothing.

local lock, done = KEYS[1], KEYS[2]
local id, nonce, to_gen = ARGV[1], ARGV[2], ARGV[3]
local ttl, done_ms = tonumber(ARGV[4]), tonumber(ARGV[5])

local time = redis.call("TIME")
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function reply(verdict)
  local r = redis.call("HMGET", lock, "id", "state", "since", "fence")
  return {verdict, r[1] or "", r[2] or "", r[3] or "0", r[4] or "0", redis.call("PTTL", lock)}
end

local record = redis.pcall("HMGET", lock, "id", "gen", "nonce", "until", "since", "fence")
if record.err then
  return string.find(record.err, "WRONGTYPE", 1, true) and {"lost", "", "", "0", "0", 0} or record
end
if not record[2] or not numbers(nil, {record[2], record[4], record[5], record[6]}) then
  return {"lost", "", "", "0", "0", 0}
end
if record[1] ~= id or record[3] ~= nonce then
  local is_repetition = record[1] == id and record[2] == to_gen and record[3] == ""
  return reply(is_repetition and "rotated" or "lost")
end

local gen, bound = record[2], record[4]
if tonumber(to_gen) > tonumber(gen) then
  if type(redis.pcall("ZCARD", done)) == "number" then -- a key of another type remembers nothing and is no error
    redis.call("ZADD", done, string.format("%.0f", now), id .. ":" .. gen)
    redis.call("PEXPIRE", done, string.format("%.0f", math.max(done_ms, redis.call("PTTL", done))))
  end
  redis.call("HSET", lock, "payload", "")
end
redis.call("HSET", lock, "gen", to_gen, "nonce", "", "state", "queued", "since", string.format("%.0f", now))
if bound then
  redis.call("HSET", lock, "uncut", string.format("%.0f", now + ttl))
  ttl = math.max(1, math.min(ttl, bound - now))
end
redis.call("PEXPIRE", lock, string.format("%.0f", ttl))
return reply("rotated")
