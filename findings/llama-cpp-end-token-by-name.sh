#!/usr/bin/env bash
# llama.cpp (in node-llama-cpp 3.21.1): a token called "</s>" that a GGUF file declares as normal text is made a control
# token, and an end of generation, because of its name alone; the file names another token as its end. Expected: what
# tokenizer.ggml.token_type and eos_token_id say. Published files have such tokens: in those of Qwen2.5 and Gemma 3,
# "</s>" closes strikethrough in HTML, so a text about HTML ends there, and a user's text can write an end token.
# Seen on 2026-11-30: "tokens [ 97, 258 ] is end true is control true".
# Needs pip, npm and Node.js 20; 100 MB into a temporary folder. Ends with 1 if that changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet gguf==0.19.0
npm install --save-exact --ignore-scripts --silent node-llama-cpp@3.21.1
cat > vocabulary.py <<'PY'
import gguf

printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = iter(range(256, 512))  # how byte-level tokenizers write the bytes that are not printable
letters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
tokens = [*letters, "</", "</s", "</s>", "<|end|>"]
out = gguf.GGUFWriter("vocabulary.gguf", "llama")
for add, value in (
    (out.add_context_length, 64), (out.add_embedding_length, 8), (out.add_block_count, 1),
    (out.add_feed_forward_length, 8), (out.add_head_count, 1), (out.add_head_count_kv, 1),
    (out.add_layer_norm_rms_eps, 1e-5), (out.add_vocab_size, len(tokens)), (out.add_tokenizer_model, "gpt2"),
    (out.add_tokenizer_pre, "gpt-2"), (out.add_token_list, tokens),
    (out.add_token_types, [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]),
    (out.add_token_merges, ["< /", "</ s", "</s >"]),
    (out.add_bos_token_id, len(tokens) - 1), (out.add_eos_token_id, len(tokens) - 1),
):
    add(value)
out.write_header_to_file()
out.write_kv_data_to_file()
out.close()
PY
env/bin/python vocabulary.py
cat > seen.mjs <<'JS'
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: "vocabulary.gguf", vocabOnly: true});
const named = 258, ids = model.tokenize("a</s>", true);
const isEnd = model.isEogToken(named), isControl = model.getTokenAttributes(named).control;
console.log("tokens", ids, "is end", isEnd, "is control", isControl);
process.exit(isEnd && isControl && ids.includes(named) ? 0 : 1);
JS
node seen.mjs 2> errors || { cat errors; exit 1; }
