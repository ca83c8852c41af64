"""Trials of KV that is kept on disk: killed writers, damaged files, full disks, budgets, and restarts.

python -m benchmarks.tiers.disk [--parts kills,flips,damage,budget] [--scale 0.1]
python -m benchmarks.tiers.engine [--model DIR] [--parts failing,crafted,killed,restart] [--scale 0.1]
"""
