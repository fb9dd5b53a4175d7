--- promise: promise a run's lock to its own retry or replacement, for when the run ends.
--
-- Until then the run keeps the lock, because its body may go on after the retry was sent.
--
-- KEYS[1]  lock     hash: id, gen, state, nonce, fence, task, args, since (ms), until (ms), payload, next, next_ttl (ms);
--                   sent, as in renew
-- ARGV[1]  id       task id that must hold the lock
-- ARGV[2]  nonce    the run that must hold it
-- ARGV[3]  next     the generation that gets the lock; empty: the promise is taken back
-- ARGV[4]  ttl_ms   ms that the lock may wait for the start of that message
-- ARGV[5]  note     on that message, for the field "sent", as in acquire; empty: none
--
-- returns  1: promised or taken back; 0: that run does not hold the lock

local lock = KEYS[1]
local id, nonce, next_gen, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local record = redis.call("HMGET", lock, "id", "nonce", "state")
if record[1] ~= id or record[2] ~= nonce or record[3] ~= "running" then
  return 0
end
if next_gen == "" then
  redis.call("HDEL", lock, "next", "next_ttl")
else
  redis.call("HSET", lock, "next", next_gen, "next_ttl", ttl)
  if ARGV[5] ~= "" then
    redis.call("HSET", lock, "sent", ARGV[5])
  end
end
return 1
