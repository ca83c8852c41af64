#!/usr/bin/env bash
# llguidance 1.7.6 and 1.9.1: a GBNF grammar in which a repeated class is followed by one of its own characters can't end
# the way llama.cpp lets it. gbnf_to_lark makes a rule that holds nothing but a class one lexeme, which takes all it can, so
# `root ::= "a" ws " b"` with `ws ::= " "*` never accepts "a  b". Expected: accepted, as GBNF goes character by character
# and tries each way. The same repetition within a rule that refers to other rules is fine.
# Seen on 2026-11-29: "a  b" accepted: False; with the class in a rule of its own and another character behind: True.
# Needs pip; a few MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > seen.py <<'PY'
import sys

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

bytes_alone = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(bytes_alone, LLMatcher.grammar_from_lark(gbnf_to_lark(grammar)))
    taken = matcher.try_consume_tokens(list(text.encode()))
    found = taken == len(text.encode()) and matcher.is_accepting()
    print(repr(grammar), repr(text), "accepted:", found)
    return found


swallowed = accepts('root ::= "a" ws " b"\nws ::= " "*', "a  b")
another = accepts('root ::= "a" ws "b"\nws ::= " "*', "a  b")
sys.exit(swallowed or not another)
PY
for release in 1.7.6 1.9.1; do
    python3 -m venv "env-$release"
    "env-$release/bin/python" -m pip install --quiet "llguidance==$release"
    echo "llguidance $release"
    "env-$release/bin/python" seen.py
done
