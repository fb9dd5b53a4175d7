--- probe: try commands on a key that holds nothing else, and leave nothing behind.
--
-- KEYS[1]  key       of this script alone; gone after the script, or once it expires if the server refuses to delete it
-- ARGV[1]  commands  JSON, one array for each: the command, and its arguments after the key
--
-- returns  JSON, one array for each command that the server refuses: the command and the error

local refused = {}
for _, command in ipairs(cjson.decode(ARGV[1])) do
  local reply = redis.pcall(command[1], KEYS[1], unpack(command, 2))
  if type(reply) == "table" and reply.err then
    refused[#refused + 1] = {command[1], reply.err}
  end
end
return #refused > 0 and cjson.encode(refused) or "[]"
