#!/usr/bin/env bash
# Measure every format on the embedded model: the default text, and a text file if one is named.
#   benchmarks/quality.sh [TEXT_FILE NAME]     writes benchmarks/results/tiny-{default,NAME}-cpu.json
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p benchmarks/results
KV=fp32,bf16,fp8,fp8_per_head,int8,int8_per_head,k8v4,int4,int4_g32,int2_g32
.venv/bin/kvq perplexity --model tiny --kv "$KV" --instrument \
  --json benchmarks/results/tiny-default-cpu.json --plot docs/kv-formats.svg
if [ $# -ge 2 ]; then
  .venv/bin/kvq perplexity --model tiny --kv "$KV" --instrument --text "$1" \
    --json "benchmarks/results/tiny-$2-cpu.json"
fi
.venv/bin/python tools/measured_tables.py
