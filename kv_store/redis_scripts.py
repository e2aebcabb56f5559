"""What Redis does in one piece, in Lua. All keys of a script share a hash tag, so a Redis Cluster runs them too.

Epochs are compared as decimal texts of one length, because Lua's numbers are too coarse for them.
"""

_FENCE = """
local kind = redis.call('TYPE', KEYS[2])['ok']
if kind ~= 'stream' and kind ~= 'none' then redis.call('DEL', KEYS[2]) end
local known = redis.call('HGET', KEYS[1], 'epoch')
if known and known > ARGV[1] then return -1 end
if known ~= ARGV[1] then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'wants', 1, 'bytes', 0)
  redis.call('SADD', KEYS[3], ARGV[2])
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 100, '*', 'joined', ARGV[2])
end
"""
"""KEYS: the replica's record, its stream, the names of all, the news. ARGV: epoch, name, milliseconds to keep it."""

_KEEP = """
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[4], ARGV[3])
"""

HEARTBEAT = f"""#!lua flags=allow-oom
{_FENCE}
local joined = redis.call('HEXISTS', KEYS[1], 'info') == 0
redis.call('HSET', KEYS[1], 'info', ARGV[4], 'ttl', ARGV[5])
redis.call('HINCRBY', KEYS[1], 'beat', 1)
redis.call('HDEL', KEYS[1], 'left')
redis.call('SADD', KEYS[3], ARGV[2])
if joined then redis.call('XADD', KEYS[4], 'MAXLEN', '~', 100, '*', 'joined', ARGV[2]) end
{_KEEP}
local wants = 0
if redis.call('HGET', KEYS[1], 'wants') == '1' or redis.call('EXISTS', KEYS[2]) == 0 then wants = 1 end
if redis.call('PEXPIRE', KEYS[5], ARGV[3]) == 0 then wants = wants + 2 end
return wants
"""
"""More KEYS: the cards. More ARGV: what is announced, the lease in milliseconds. 1: wants a snapshot; 2: has no card.

Allowed when memory is full: a cluster must not lose its replicas to that.
"""

PUBLISH = f"""#!lua
{_FENCE}
local added = 0
for i = 7, #ARGV do
  redis.call('XADD', KEYS[2], string.format('%s-%d', ARGV[4], ARGV[5] + i - 7), 'batch', ARGV[i])
  added = added + #ARGV[i]
end
local capacity = tonumber(ARGV[6])
if capacity > 0 then
  local bytes = redis.call('HINCRBY', KEYS[1], 'bytes', added)
  if bytes > capacity then redis.call('HSET', KEYS[1], 'wants', 1) end
  if bytes > 2 * capacity then
    redis.call('XTRIM', KEYS[2], 'MAXLEN', math.ceil(redis.call('XLEN', KEYS[2]) / 2))
    redis.call('HSET', KEYS[1], 'bytes', capacity)
  end
end
{_KEEP}
return tonumber(redis.call('HGET', KEYS[1], 'wants'))
"""
"""More ARGV: epoch and number of the first entry, bytes between snapshots (0: do not count these), batches."""

SNAPSHOT = f"""#!lua flags=allow-oom
{_FENCE}
local id = ARGV[4] .. '-' .. ARGV[5]
redis.call('XADD', KEYS[2], id, 'batch', ARGV[6])
redis.call('XTRIM', KEYS[2], 'MINID', id)
redis.call('HSET', KEYS[1], 'wants', 0, 'bytes', 0)
{_KEEP}
return 0
"""
"""More ARGV: epoch and number of the entry, the first part. Allowed when memory is full: it makes room."""

LEAVE = """#!lua flags=allow-oom
local known = redis.call('HGET', KEYS[1], 'epoch')
if not known or known > ARGV[1] then return -1 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'wants', 1, 'bytes', 0, 'left', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 100, '*', 'left', ARGV[2])
return 0
"""

WANT = """#!lua flags=allow-oom
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'wants', 1) end
return 0
"""

RECORDS = """#!lua flags=no-writes
local rows = {}
for i, key in ipairs(KEYS) do rows[i] = redis.call('HMGET', key, 'info', 'beat', 'ttl', 'left', 'epoch') end
return cmsgpack.pack(rows)
"""
"""KEYS: records. One packed answer, because a thousand small ones cost a reader tens of milliseconds."""

SPEND = """#!lua
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local levels, done = {}, true
for i, key in ipairs(KEYS) do
  local cost, capacity = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local row = redis.call('HMGET', key, 'level', 'at')
  levels[i] = capacity
  if row[1] then levels[i] = math.min(capacity, row[1] + math.max(0, now - row[2]) * capacity / 60) end
  if ARGV[1] == '0' and levels[i] < math.min(cost, capacity) - 0.000001 then done = false end
end
for i, key in ipairs(KEYS) do
  if done then
    local capacity = tonumber(ARGV[2 * i + 1])
    levels[i] = math.min(capacity, levels[i] - ARGV[2 * i])
    redis.call('HSET', key, 'level', string.format('%.6f', levels[i]), 'at', string.format('%.6f', now))
    redis.call('PEXPIRE', key, math.ceil((capacity - levels[i]) * 60000 / capacity) + 1000)
  end
  levels[i] = string.format('%.6f', levels[i])
end
return {done and 1 or 0, unpack(levels)}
"""
"""KEYS: buckets. ARGV: 1 to take in any case, else 0; for each bucket what is to be taken, and what it holds.

1 if it was done, and the level of each. A bucket is forgotten when it is full. Redis's own clock counts.
"""
