#!/usr/bin/env bash
# torch 2.13.0 on CPUs: an elementwise function gives an element other bits if the tensor around it has another size, or
# if another number of threads computes. Rows of 80 elements: silu of one row alone differs from silu of the same row as
# the last of three; gelu (tanh) of 26,752 elements has other bits with 5 threads than with 1. The last elements of each
# thread's share are computed in scalar code, whose exponentials round differently. Expected: torch's notes on
# reproducibility name sums and products, whose order may change; an elementwise function has no order.
# Seen on 2026-11-30 on an AVX-512 CPU: "silu: 1 elements of rows of 80 differ; gelu: 2 of 26752 elements differ".
# Needs pip and a CPU with AVX2 or AVX-512; about 300 MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 numpy
cat > seen.py <<'PY'
import sys

import torch
from torch.nn.functional import gelu, silu

torch.manual_seed(0)
x = torch.randn(3, 80) * 4
rows = sum(int((silu(x)[i] != silu(x[i : i + 1])[0]).sum()) for i in range(3))
y = torch.randn(26_752) * 4
torch.set_num_threads(1)
one = gelu(y, approximate="tanh")
torch.set_num_threads(5)
threads = int((gelu(y, approximate="tanh") != one).sum())
print(f"silu: {rows} elements of rows of 80 differ; gelu: {threads} of {len(y)} elements differ")
sys.exit(not (rows and threads))
PY
env/bin/python -W ignore seen.py
