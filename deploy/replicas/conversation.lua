-- Gives a request without the header x-session-id one: a hash of its conversation up to the first question, so that all
-- turns of a chat reach the replica that has its beginning in the cache.

local MOST = 4096  -- bytes that are hashed, the last ones: of a long system prompt its end and the question

-- The part of a body that every turn of its conversation begins with, or nil.
function beginning(body)
  local _, first = body:find('"messages"%s*:')
  if not first then
    _, first = body:find('"input"%s*:%s*%[')
  end
  if first then
    local _, question = body:find('"role"%s*:%s*"user"', first)
    local last = question and body:find("}", question, true)
    return last and body:sub(math.max(first, last - MOST), last)
  end
  local _, text = body:find('"prompt"%s*:%s*"')
  if not text then
    _, text = body:find('"input"%s*:%s*"')
  end
  return text and body:sub(text, text + 255)
end

-- FNV-1a of 32 bits (Fowler, Noll and Vo), in hexadecimal digits.
function hash(text)
  local value = 2166136261
  for i = 1, #text do
    value = bit.bxor(value, text:byte(i))
    -- times 16777619 modulo 2^32: the factor's high and low halves apart, since numbers are exact to 2^53 only
    value = bit.tobit((value % 65536) * 16777619 + (math.floor(value / 65536) * 16777619 % 65536) * 65536)
  end
  return bit.tohex(value)
end

function envoy_on_request(handle)
  if handle:headers():get("x-session-id") or handle:headers():get(":method") ~= "POST" then
    return
  end
  local body = handle:body()
  local key = body and beginning(body:getBytes(0, body:length()))
  if key then
    handle:headers():add("x-session-id", hash(key))
  end
end
