--- candidates: return which entries may meet some conditions, by their stored strings; writes nothing.
--
-- It never leaves out an entry that meets them, and may return one that does not: the caller decides on decoded fields.
--
-- KEYS[1]     quarantine  hash: why an entry cannot be used, by its member in the schedule
-- KEYS[2...]  entries     hashes: definition, policy
-- ARGV[1]     prefix      of the keys of entries; the rest is the name
-- ARGV[2]     text        in the name or the task, in lower case (ASCII); empty: any
-- ARGV[3]     task        the task, in lower case; empty: any
-- ARGV[4]     tag         one of the tags; empty: any
-- ARGV[5]     state       a word of State; empty: any
--
-- returns  JSON array: the numbers of the entries, beginning with 1

local quarantine, prefix, text, task, tag, state = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local find, lower = string.find, string.lower -- as locals they cost less, and it looks at all entries

--- Return whether a string of JSON may contain a string as a value.
local function may_have(json, what)
  return find(json, what, 1, true) or find(json, "\\", 1, true)
end

--- Return whether the task of a definition may contain a string.
local function task_may_have(definition, what)
  if find(definition, "\\", 1, true) then  -- a character may be escaped
    local is_read, fields = pcall(cjson.decode, definition)
    if is_read and type(fields) == "table" and type(fields.task) == "string" then
      return find(lower(fields.task), what, 1, true)
    end
  end
  return find(lower(definition), what, 1, true)
end

local function may_be(entry, definition, policy)
  if state == "quarantined" then
    local found = redis.call("HMGET", quarantine, entry, string.sub(entry, #prefix + 1))
    return (found[1] or found[2]) and true
  elseif state == "paused" then
    return may_have(policy, '"paused"')
  elseif state == "disabled" then
    return may_have(definition, '"enabled"') and not find(definition, '"enabled"%s*:%s*true%s*}%s*$')
  elseif state == "active" then  -- a policy has no objects in it, and the last brace is that of the definition
    return not find(policy, '"paused"%s*:%s*true') and not find(definition, '"enabled"%s*:%s*false%s*}%s*$')
  end
  return true
end

local needs_definition = text ~= "" or task ~= "" or state == "disabled" or state == "active"
local needs_policy = tag ~= "" or state == "paused" or state == "active"

local function read(entry, field)
  local found = redis.pcall("HGET", entry, field)
  return type(found) == "string" and found or ""  -- the key may be of another type
end

local numbers, first = {}, #prefix + 1
for i = 2, #KEYS do
  local entry = KEYS[i]
  local definition = needs_definition and read(entry, "definition") or ""
  if (text == "" or find(lower(entry), text, first, true) or task_may_have(definition, text))
    and (task == "" or task_may_have(definition, task)) then
    local policy = needs_policy and read(entry, "policy") or ""
    if (tag == "" or may_have(policy, tag)) and may_be(entry, definition, policy) then
      numbers[#numbers + 1] = i - 1
    end
  end
end
return #numbers > 0 and cjson.encode(numbers) or "[]"
