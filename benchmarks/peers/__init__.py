"""kvq beside other engines on a CPU: `python -m benchmarks.peers`; see docs/peers.md."""
