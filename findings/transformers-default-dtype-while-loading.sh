#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0: while from_pretrained builds a model, torch.empty(1) in every other thread of the process has the
# dtype of the model's weights: the default dtype is set for the process, not for the loading thread. Expected: loading
# one model in a thread changes no tensor that other threads make, such as those of a model that is serving. A library
# whose compiled code takes such a tensor's address as float32 reads and writes the wrong bytes.
# Seen on 2026-11-30: "dtypes of torch.empty(1) in another thread: before torch.float32, meanwhile torch.bfloat16
# torch.float32, after torch.float32".
# Needs pip; about 300 MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0
cat > seen.py <<'PY'
import sys
from threading import Event, Thread

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=24, num_attention_heads=2,
    num_key_value_heads=2,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("model")
before, meanwhile, loaded = torch.empty(1).dtype, set(), Event()


def watch() -> None:
    while not loaded.is_set():
        meanwhile.add(str(torch.empty(1).dtype))


watcher = Thread(target=watch)
watcher.start()
sys.setswitchinterval(1e-5)
AutoModelForCausalLM.from_pretrained("model", dtype="auto")
loaded.set()
watcher.join()
after = torch.empty(1).dtype
print("dtypes of torch.empty(1) in another thread: before", before, ", meanwhile", *sorted(meanwhile), ", after", after)
sys.exit(not (before == after == torch.float32 and "torch.bfloat16" in meanwhile))
PY
HF_HUB_OFFLINE=1 env/bin/python -W ignore seen.py 2> errors || { cat errors; exit 1; }
