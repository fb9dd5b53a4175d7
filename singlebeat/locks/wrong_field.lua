--- wrong_field: return what is wrong with the fields of a record that must be numbers.
--
-- A function for other scripts. Uses numbers.
--
-- KEYS[1]      where the record is, for people: its key and ": "; empty: the lock itself
-- KEYS[2...]   names of the fields
-- ARGV[1...]   their values; false: the field is missing, which is fine
--
-- returns  a sentence that names the first field that is no number; nil if there is none

if numbers(nil, ARGV) then
  return nil
end
for i, value in ipairs(ARGV) do
  if value and not numbers(nil, {value}) then
    return KEYS[1] .. "its field " .. KEYS[i + 1] .. ' must be a number, and is "' .. string.sub(value, 1, 20) .. '"'
  end
end
