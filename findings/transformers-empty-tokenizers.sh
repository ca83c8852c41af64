#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer of a folder with a config.json and no file of a tokenizer raises for llama, and for qwen2,
# gpt2 and gemma gives a tokenizer that knows special tokens alone: every text becomes no token, or unknown ones, without
# a word. Expected: an error for all of them. Whoever forgets tokenizer.json in copying a model serves empty prompts.
# Seen on 2026-11-29: qwen2 and gpt2 a tokenizer of 1 token, by which "Hello, world" is []; gemma one of 5, by which it is [3];
# llama a ValueError.
# Needs pip; some MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet transformers==5.23.0 tokenizers
cat > seen.py <<'PY'
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

made, raised = [], []
for family in ("qwen2", "gpt2", "gemma", "llama"):
    folder = Path(family)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": 1000}))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raised.append(family)
        print(family, "raises", type(error).__name__)
        continue
    ids = tokenizer.encode("Hello, world", add_special_tokens=False)
    made.append(family)
    print(family, "gives", type(tokenizer).__name__, "of", len(tokenizer), "tokens;", repr("Hello, world"), "is", ids)
sys.exit(not (made == ["qwen2", "gpt2", "gemma"] and raised == ["llama"]))
PY
HF_HUB_OFFLINE=1 env/bin/python -W ignore seen.py 2> errors || { cat errors; exit 1; }
