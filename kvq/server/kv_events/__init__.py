"""Block events for routers, in vLLM's format over ZeroMQ: which replica holds which prefix."""
