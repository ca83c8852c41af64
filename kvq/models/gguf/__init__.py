"""Reading of GGUF files, which hold a model's configuration, tokenizer and weights in one."""
