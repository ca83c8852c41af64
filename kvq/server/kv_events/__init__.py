"""Block events in vLLM's format over ZeroMQ, which tell routers which replica has which prefix cached."""
