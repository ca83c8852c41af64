"""LoRA adapters: low-rank updates of a product's rows, each row by its own adapter."""
