"""Sessions of agents, recorded or generated, replayed and judged: what KV formats change in them."""
