"""vLLM benchmark: kvq's formats inside vLLM, compared with vLLM's own cache."""
