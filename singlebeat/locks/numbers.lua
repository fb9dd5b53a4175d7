--- numbers: return whether the values are numbers as the scripts of locks write them.
--
-- A function for other scripts. Any program may write a lock, and arithmetic with other text would end a whole batch.
--
-- ARGV[1...]  fields of a record; false: the field is missing, which is fine
--
-- returns  whether all are numbers

for _, value in ipairs(ARGV) do
  if value and (#value > 16 or not string.find(value, "^%d+%.?%d*$")) then
    return false
  end
end
return true
