"""KV formats on real models, texts and tasks: `python -m benchmarks.real`; see docs/real.md."""
