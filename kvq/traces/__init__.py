"""What KV formats do to agents' sessions: recorded ones, generated ones, replayed and judged."""
