--- permitted: return the error of the first command that the user of a script may not run; writes nothing.
--
-- For scripts that write several keys: a server does not undo what a script has written when it refuses a later command.
-- A server before Redis 7.0 cannot tell beforehand; then nothing is checked.
--
-- KEYS[1...]  keys      on which the script runs the commands, one for each command; their values are not read
-- ARGV[1...]  commands  names
--
-- returns  an error that names the command as that of the server does; nil if the user may run all

for i, command in ipairs(ARGV) do
  if redis.acl_check_cmd and not redis.acl_check_cmd(command, KEYS[i]) then
    return redis.error_reply("NOPERM User has no permissions to run the '" .. string.lower(command) .. "' command")
  end
end
