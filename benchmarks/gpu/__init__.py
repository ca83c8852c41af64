"""Check and measure all that runs on a GPU: `make gpu`, or `python3 -m benchmarks.gpu`; see docs/gpu.md."""
