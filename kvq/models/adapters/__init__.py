"""LoRA adapters: PEFT's folders, placing in memory, and the rows of a step that they change."""
