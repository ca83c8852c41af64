"""Tasks of EleutherAI's lm-evaluation-harness over kvq's models."""
