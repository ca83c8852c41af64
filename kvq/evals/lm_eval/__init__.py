"""Tasks of EleutherAI's lm-evaluation-harness on kvq's models."""
