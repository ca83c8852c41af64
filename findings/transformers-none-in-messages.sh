#!/usr/bin/env bash
# transformers 5.23.0: apply_chat_template drops keys of messages that are None before the template sees them, so that a template
# which asks `message['content'] is none` (published ones do, for turns that hold calls alone) takes the other branch and
# fails. Expected: what rendering the same template with the same messages by jinja2 alone gives. OpenAI's clients send
# "content": null beside tool_calls.
# Seen on 2026-11-29: jinja2 "calls f;", apply_chat_template "UndefinedError 'dict object' has no attribute 'content'".
# Needs pip; some MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet transformers==5.23.0 tokenizers jinja2
cat > seen.py <<'PY'
import sys

from jinja2 import Environment
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is none %}calls {{ m['tool_calls'][0]['function']['name'] }};"
    "{% else %}{{ m['content'].strip() }};{% endif %}{% endfor %}"
)
call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
alone = Environment().from_string(TEMPLATE).render(messages=messages)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
try:
    by_library = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
except Exception as error:
    by_library = f"{type(error).__name__} {error}"
print("jinja2:", alone, "| apply_chat_template:", by_library)
sys.exit(not (alone == "calls f;" and "no attribute 'content'" in by_library))
PY
HF_HUB_OFFLINE=1 env/bin/python -W ignore seen.py 2> errors || { cat errors; exit 1; }
