"""Draw each row's token from what temperature, min-p, top-k and top-p leave of its logits."""
