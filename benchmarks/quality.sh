#!/usr/bin/env bash
# Measure every format on the embedded model: the default text, and, with intervals, a text file if one is named.
#   benchmarks/quality.sh [TEXT_FILE NAME]     writes benchmarks/results/tiny-{default,NAME}-cpu.json
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p benchmarks/results
KV=fp32,bf16,fp8,fp8_per_head,int8,int8_per_head,int6,k8v4,int5,int4,int4_g64_rot,int3,int2,int2_g32
STAGED=int4_mean,int4_g64_s8_mean_rot,int3_mean,int3_g32_s8_mean_rot/int3_g64_s8_mean_rot,int2_mean
STAGED=$STAGED,int3+sinks=4+recent=128
.venv/bin/kvq perplexity --model tiny --kv "$KV" --instrument \
  --json benchmarks/results/tiny-default-cpu.json --plot docs/kv-formats.svg
if [ $# -ge 2 ]; then
  .venv/bin/kvq eval --model tiny --kv "$KV,$STAGED" --instrument --text "$1" \
    --json "benchmarks/results/tiny-$2-cpu.json"
fi
.venv/bin/python tools/measured_tables.py
