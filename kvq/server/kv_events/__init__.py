"""Block events in vLLM's format over ZeroMQ, from which routers learn the cached prefixes of each replica."""
