#!/usr/bin/env bash
# llguidance 1.9.1 with a tokenizer of the tokenizers library 0.22.1: where a grammar forces a text that spells a special
# token, the mask holds that special token alone, and the matcher then refuses it. Expected: what the mask lets through is
# accepted; plain tokens that spell the text would be. Where two texts are possible, nothing is forced and plain tokens come.
# Seen on 2026-11-29: the mask of "<|end|>" holds the special token, accepted: 0 of 1; of "<|end|>" or "b" plain ones.
# Needs pip; a few MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > seen.py <<'PY'
import sys

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|end|>", special=True)])
special = tokenizer.token_to_id("<|end|>")
taken = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))


def first(lark: str) -> tuple[list[int], int]:
    matcher = LLMatcher(taken, LLMatcher.grammar_from_lark(lark))
    mask = matcher.compute_logit_bias()
    allowed = [token for token, bias in enumerate(mask) if bias]
    accepted = matcher.try_consume_tokens(allowed[:1])
    print(lark, "| the mask holds", [tokenizer.id_to_token(token) for token in allowed], "| accepted:", accepted, "of 1")
    return allowed, accepted


forced, refused = first('start: "<|end|>"')
free, accepted = first('start: "<|end|>" | "b"')
sys.exit(not (forced == [special] and refused == 0 and special not in free and accepted == 1))
PY
python3 -m venv env
env/bin/python -m pip install --quiet llguidance==1.9.1 tokenizers==0.22.1
env/bin/python seen.py
