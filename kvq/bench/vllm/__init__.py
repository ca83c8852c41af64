"""vLLM benchmark: kvq's formats inside vLLM beside vLLM's own cache."""
