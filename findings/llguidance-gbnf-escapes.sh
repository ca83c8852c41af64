#!/usr/bin/env bash
# llguidance 1.7.6 and 1.9.1: gbnf_to_lark takes the leading zero off a GBNF escape of four digits, \u00e9 becomes \ue9,
# which its own reader of Lark then refuses ("lexer error"). Expected: \u00e9 in both. An escape whose first digit is
# no zero, such as \u2192, goes through as it is. llama.cpp's own grammars (json.gbnf and what its converter of JSON
# schemas writes) use such escapes.
# Seen on 2026-11-29: "start: "\ue9"", "lexer error" and "start: "\u2192"", no error, in both releases.
# Needs pip; a few MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > seen.py <<'PY'
import sys

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark


def told(escape: str) -> tuple[bool, str]:
    lark = gbnf_to_lark('root ::= "' + escape + '"')
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark))
    print(escape, "->", " ".join(lark.split()), "|", error.strip().splitlines()[0] if error else "no error")
    return escape in lark, error


kept, error = told(r"\u00e9")
other, no_error = told(r"\u2192")
sys.exit(not (not kept and error and other and not no_error))
PY
for release in 1.7.6 1.9.1; do
    python3 -m venv "env-$release"
    "env-$release/bin/python" -m pip install --quiet "llguidance==$release"
    echo "llguidance $release"
    "env-$release/bin/python" seen.py
done
