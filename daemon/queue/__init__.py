"""The durable job queue: Redis keys, Lua scripts and the embedded server."""
