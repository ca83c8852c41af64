"""kvq inside vLLM beside vLLM's own cache."""
