"""LoRA adapters in PEFT's folders: their configuration and weights, and the rows of a step that they change."""
